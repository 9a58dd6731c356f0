"""HST118: loading that may run code from the file."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Const
from hasten.script.rules.file import File, Rule, first_of_each_line


class LoadWithoutWeightsOnly(Rule):
    """`torch.load(..., weights_only=False)` runs whatever code the file asks for.

    ## What it does

    Finds `torch.load` with `weights_only=False`. (Without the argument PyTorch 2.6 and later load
    weights only, older versions do not.)

    ## Why is this bad?

    A checkpoint is a pickle: one from somebody else can do anything to your machine.

    ## Bad

    ```python
    import torch

    state = torch.load("weights.pt", map_location="cpu", weights_only=False)
    ```

    ## Good

    ```python
    import torch

    state = torch.load("weights.pt", map_location="cpu", weights_only=True)
    ```

    ## Fix safety

    Files that hold more than tensors and plain values do not load any more: save a `state_dict()`.
    """

    code = "HST118"

    def check(self, file: File) -> Iterator[Finding]:
        """Loads that trust the file."""
        return first_of_each_line(
            self.finding(
                file, seen.node, "weights_only=False runs code that the file contains.",
                "weights_only=True, with files that hold a state_dict",
            )
            for seen in file.facts.all("call", "torch.load")
            if isinstance(flag := seen.kwargs.get("weights_only"), Const) and flag.value is False
        )  # fmt: skip
