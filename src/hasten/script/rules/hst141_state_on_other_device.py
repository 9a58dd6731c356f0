"""HST141: optimizer state is loaded before the model is moved."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class StateOnOtherDevice(Rule):
    """`optimizer.load_state_dict` while the model is on the CPU, and the move comes after it.

    ## What it does

    Finds an optimizer's `load_state_dict` whose model is moved to the device later.

    ## Why is this bad?

    Loading puts the state where the parameters are. The move takes the parameters along but not the
    state: the first step after the resume mixes devices.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(torch.load("optimizer.pt", map_location="cpu"))
    model.to(device)
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(torch.load("optimizer.pt", map_location="cpu"))
    ```

    ## Fix safety

    Safe: only the order of two statements changes.
    """

    code = "HST141"

    def check(self, file: File) -> Iterator[Finding]:
        """State that stays behind."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        order = file.facts.seen
        for index, seen in enumerate(order):
            if seen.kind != "optimizer-load":
                continue
            left = [m for m, place in seen.data["places"].items() if place == "cpu"]
            for later in order[index + 1 :]:
                if later.kind == "move" and later.receiver in left and later.data["place"] == "dev":
                    yield self.finding(
                        file, seen.node,
                        "the optimizer's state is loaded to where the parameters are, the CPU; line"
                        f" {file.line(later.node)} then moves the parameters alone.",
                        "move the model before loading the optimizer's state",
                        severity="warning" if seen.assumed else "error",
                        related=[(later.node, "the model is moved here")],
                    )  # fmt: skip
                    break
