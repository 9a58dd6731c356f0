"""HST133: the old names of automatic mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class DeprecatedCudaAmp(Rule):
    """`torch.cuda.amp` is deprecated; `torch.amp` takes the device's type.

    ## What it does

    Finds calls of `torch.cuda.amp.autocast`, `GradScaler`, `custom_fwd` and `custom_bwd`.

    ## Why is this bad?

    They warn in each run, work for CUDA alone, and will go.

    ## Bad

    ```python
    import torch

    scaler = torch.cuda.amp.GradScaler()
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    ```

    ## Fix safety

    Safe.
    """

    code = "HST133"

    def check(self, file: File) -> Iterator[Finding]:
        """Old names."""
        return first_of_each_line(
            self.finding(
                file, seen.node, f"`{seen.name}` is deprecated.",
                f"torch.amp.{seen.name.rsplit('.', 1)[-1]}(device.type, ...)",
            )
            for seen in file.facts.of("call")
            if seen.name.startswith("torch.cuda.amp.")
        )  # fmt: skip
