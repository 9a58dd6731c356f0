"""HST111: a module is called with tensors of the device but was never moved."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Module
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class ModuleNotMoved(Rule):
    """A module's parameters are on the CPU, and it is called with tensors of the device.

    ## What it does

    Finds a second model (a teacher, a discriminator, a copy made before the move) or a layer made
    outside the model, that no `.to(device)` reaches.

    ## Why is this bad?

    Its first call fails: input on the device, weights on the CPU.

    ## Bad

    ```python
    import copy

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student = torch.nn.Linear(4, 2)
    teacher = copy.deepcopy(student)
    student.to(device)
    soft = teacher(torch.randn(3, 4, device=device))
    ```

    ## Good

    ```python
    import copy

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student = torch.nn.Linear(4, 2).to(device)
    teacher = copy.deepcopy(student)
    soft = teacher(torch.randn(3, 4, device=device))
    ```

    ## Fix safety

    Safe.
    """

    code = "HST111"

    def check(self, file: File) -> Iterator[Finding]:
        """Modules that stayed behind."""
        for meeting in meetings(file, self.code):
            use = meeting.mix.seen.node
            copied = meeting.origin is not None and isinstance(meeting.origin.owner, Module)
            yield self.finding(
                file, meeting.node,
                f"`{file.short(meeting.node)}`"
                f" {'is a copy made on the CPU' if copied else 'makes a module on the CPU'}"
                f" and nothing moves it; on line {file.line(use)} it gets tensors of the device.",
                "make the copy after the move, or move it with .to(device) too"
                if copied
                else "move it with .to(device)",
                severity=meeting.severity,
                related=[
                    (use, "it is used with the device here"),
                    *([(meeting.origin.node, "it is made here")] if meeting.origin else []),
                ],
            )  # fmt: skip
