"""HST119: a class's own `to` forgets one of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class MovedByParts(Rule):
    """A class moves its tensors with a `to` of its own, and leaves one behind.

    ## What it does

    Finds classes with a `to` or `cuda` method, one of whose tensors is still on the CPU when it
    meets the device.

    ## Why is this bad?

    Whoever calls `batch.to(device)` takes all of it to be there.

    ## Bad

    ```python
    import torch


    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def to(self, device):
            self.x = self.x.to(device)
            return self


    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = Pair(torch.ones(3), torch.ones(3)).to(device)
    total = pair.x + pair.y
    ```

    ## Good

    ```python
    import torch


    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def to(self, device):
            self.x, self.y = self.x.to(device), self.y.to(device)
            return self


    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = Pair(torch.ones(3), torch.ones(3)).to(device)
    total = pair.x + pair.y
    ```

    ## Fix safety

    Safe.
    """

    code = "HST119"

    def check(self, file: File) -> Iterator[Finding]:
        """Fields left behind."""
        for meeting in meetings(file, self.code):
            name = meeting.origin.name if meeting.origin is not None else "a field"
            use = meeting.mix.seen.node
            yield self.finding(
                file, meeting.node,
                f"this leaves `{name}` on the CPU; on line {file.line(use)} it meets the device.",
                f"move `{name}` here too",
                severity=meeting.severity, related=[(use, "it meets the device here")],
            )  # fmt: skip
