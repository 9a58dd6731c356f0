"""HST105: a module keeps a tensor that does not move with it."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Module
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class TensorAttributeNotBuffer(Rule):
    """A tensor is an attribute of a module, but neither a buffer nor a parameter.

    ## What it does

    Finds tensors that a module keeps as a plain attribute and uses with tensors of the device.

    ## Why is this bad?

    `module.to(device)` moves parameters and buffers only. The attribute stays on the CPU, the
    operation fails, and the tensor is missing from `state_dict()`.

    ## Bad

    ```python
    import torch
    from torch import nn


    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(3)
            self.proj = nn.Linear(3, 3)

        def forward(self, x):
            return self.proj(x) - self.mean


    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Scale().to(device)(torch.randn(2, 3, device=device))
    ```

    ## Good

    ```python
    import torch
    from torch import nn


    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3), persistent=False)
            self.proj = nn.Linear(3, 3)

        def forward(self, x):
            return self.proj(x) - self.mean


    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Scale().to(device)(torch.randn(2, 3, device=device))
    ```

    ## Fix safety

    Safe with `persistent=False`; a persistent buffer is a new key of `state_dict()`, which older
    checkpoints lack.
    """

    code = "HST105"

    def check(self, file: File) -> Iterator[Finding]:
        """Attributes that stay behind."""
        for meeting in meetings(file, self.code):
            origin = meeting.origin
            owner = origin.owner if origin is not None else None
            name = origin.name if origin is not None else "?"
            cls = (
                owner.cls.name
                if isinstance(owner, Module) and owner.cls is not None
                else "the module"
            )
            yield self.finding(
                file, meeting.node,
                f"`self.{name}` of {cls} is a plain tensor: .to(device) leaves it on the CPU, and"
                f" {meeting.mix.what} on line {file.line(meeting.mix.seen.node)} meets the device.",
                f'self.register_buffer("{name}", ..., persistent=False), or nn.Parameter if'
                ' it is to be trained',
                severity=meeting.severity,
                related=[(meeting.mix.seen.node, "it meets the device here")],
            )  # fmt: skip
