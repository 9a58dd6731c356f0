"""HST115: an operation mixes devices, for no reason that another rule knows."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.meetings import meetings


class DeviceMismatch(Rule):
    """An operation gets one tensor on the CPU and one on the device.

    ## What it does

    Finds operations whose operands surely lie on different devices, where no other rule says why:
    a tensor brought back with `.cpu()`, say, and used with one that stayed.

    ## Why is this bad?

    "Expected all tensors to be on the same device".

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    y = x.cpu() + x
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    y = x + x
    ```

    ## Fix safety

    Not fixed by itself: which of the two is to be moved is for you to say.
    """

    code = "HST115"

    def check(self, file: File) -> Iterator[Finding]:
        """Operations on two devices."""
        return first_of_each_line(
            self.finding(
                file, meeting.node,
                f"{meeting.mix.what} gets one tensor on the CPU and one on the"
                " device.",
                "bring both to one device before",
                severity=meeting.severity,
                related=[]
                if meeting.origin is None
                else [(meeting.origin.node, "the one on the CPU comes from here")],
            )
            for meeting in meetings(file, self.code)
        )  # fmt: skip
