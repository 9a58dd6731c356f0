"""HST110: a tensor on the CPU is indexed by one on the device."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class IndexOnOtherDevice(Rule):
    """A tensor on the CPU is indexed with indices that are on the device.

    ## What it does

    Finds `table[index]` with `table` surely on the CPU and `index` surely on the device. The other
    way round is allowed and not reported.

    ## Why is this bad?

    PyTorch refuses: "indices should be either on cpu or on the same device as the indexed tensor".

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = torch.randn(10, 4)
    index = torch.tensor([1, 2]).to(device)
    rows = table[index]
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = torch.randn(10, 4, device=device)
    index = torch.tensor([1, 2]).to(device)
    rows = table[index]
    ```

    ## Fix safety

    Safe; the table now takes memory of the device.
    """

    code = "HST110"

    def check(self, file: File) -> Iterator[Finding]:
        """Tables left on the CPU."""
        for meeting in meetings(file, self.code):
            use = meeting.mix.seen.node
            related = [(use, "it is indexed from the device here")]
            if meeting.origin is not None:
                related.append((meeting.origin.node, "the table is made here"))
            if meeting.node is use:
                message = (
                    f"`{file.short(use)}` indexes a table on the CPU from the device; what it"
                    " gives is moved only after that."
                )
                fix = "index on the CPU: table[index.cpu()].to(device), or keep the table there"
            else:
                message = (
                    f"`{file.short(meeting.node)}` is on the CPU and is indexed on line"
                    f" {file.line(use)} by a tensor on the device."
                )
                fix = "keep both on one device: make it with device=device"
            yield self.finding(
                file, meeting.node, message, fix, severity=meeting.severity, related=related
            )
