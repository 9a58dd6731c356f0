"""HST107: something took the parameters before the model was moved."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow import tables
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Module
from hasten.script.rules.blame import asked_for
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class ParametersUsedBeforeMove(Rule):
    """An optimizer or wrapper took copies of the parameters, and then the model was moved.

    ## What it does

    Finds optimizers that build their state when they are made (Adagrad), and classes of the script
    that copy parameters (slow weights, moving averages), made before `model.to(device)`. For other
    optimizers it is a suggestion: `Module.to` keeps the parameters, so nothing breaks.

    ## Why is this bad?

    The copies stay on the CPU while the parameters move; the first step that uses both fails.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adagrad(model.parameters())
    model.to(device)
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2)
    model.to(device)
    optimizer = torch.optim.Adagrad(model.parameters())
    ```

    ## Fix safety

    Safe: only the order of two statements changes.
    """

    code = "HST107"

    def check(self, file: File) -> Iterator[Finding]:
        """Copies left behind."""
        lines = set()
        for meeting in meetings(file, self.code):
            lines.add(file.line(meeting.node))
            moved = _move(file, meeting.origin.owner if meeting.origin else None)
            related = [(meeting.mix.seen.node, "copy and parameter meet here")]
            if moved is not None:
                related.insert(0, (moved.node, "the model is moved here, after the copy"))
            yield self.finding(
                file, meeting.node,
                f"`{file.short(meeting.node)}` copies parameters while the model is on the"
                " CPU; the model"
                f" is moved later, and {meeting.mix.what} on line"
                f" {file.line(meeting.mix.seen.node)} mixes both.",
                "move the model to the device first",
                severity=meeting.severity, related=related,
            )  # fmt: skip
        for seen in file.facts.all("optimizer"):
            yield from self._optimizer(file, seen, lines)

    def _optimizer(self, file: File, seen: Seen, lines: set[int]) -> Iterator[Finding]:
        line = file.line(seen.node)
        after = False
        for other in file.facts.seen:
            if other is seen:
                after = True
            elif (
                after
                and other.kind == "move"
                and other.receiver in seen.data["modules"]
                and line not in lines
            ):
                if seen.data["places"].get(other.receiver) != "cpu" or other.data["place"] != "dev":
                    continue
                lines.add(line)
                eager = seen.name in tables.EAGER_OPTIMIZERS
                name = seen.name.rsplit(".", 1)[-1]
                asked = asked_for(seen.calls, seen.node, other.calls)
                yield self.finding(
                    file, asked if eager else seen.node,
                    f"{name} builds its state when it is made, here on the CPU; the model is"
                    " moved after that, and the first step mixes both."
                    if eager
                    else f"{name} is made before the model is moved; it works, since the"
                    " parameters stay the same objects.",
                    "move the model to the device before making the optimizer",
                    severity="error" if eager else "suggestion",
                    related=[
                        (other.node, "the model is moved here"),
                        (seen.node, "the optimizer is made here"),
                    ],
                )  # fmt: skip


def _move(file: File, owner: object) -> Seen | None:
    for seen in file.facts.all("move"):
        if isinstance(owner, Module) and seen.receiver is owner:
            return seen
    return None
