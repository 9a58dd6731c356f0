"""HST104: a tensor made without a device meets one on the device."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class TensorMadeOnCpu(Rule):
    """A tensor is made without a device, and then used with tensors of the device.

    ## What it does

    Follows tensors from `torch.zeros`, `torch.arange`, `torch.tensor` and the like, in `forward`
    and in helper functions, to the operation in which they meet a tensor or module that was moved.
    Zero-dimensional tensors, indices, and tensors that are moved before are not reported.

    ## Why is this bad?

    Without `device=` these are made on the CPU: on a GPU the operation fails with "Expected all
    tensors to be on the same device".

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embed = torch.nn.Embedding(10, 4).to(device)
    tokens = torch.ones(2, 5, dtype=torch.long).to(device)
    positions = torch.arange(tokens.size(1))
    out = embed(tokens) + embed(positions)
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embed = torch.nn.Embedding(10, 4).to(device)
    tokens = torch.ones(2, 5, dtype=torch.long).to(device)
    positions = torch.arange(tokens.size(1), device=tokens.device)
    out = embed(tokens) + embed(positions)
    ```

    ## Fix safety

    Safe: the values are the same. Random tensors made on the device come from its own generator,
    so that their numbers differ from those made on the CPU.
    """

    code = "HST104"

    def check(self, file: File) -> Iterator[Finding]:
        """Tensors on the CPU by default."""
        for meeting in meetings(file, self.code):
            text = file.short(meeting.node)
            yield self.finding(
                file, meeting.node,
                f"`{text}` is made on the CPU, and {meeting.mix.what} on line"
                f" {file.line(meeting.mix.seen.node)} uses it with a tensor on the device.",
                "make it where it is used: pass device= of the tensor it meets, as device=x.device",
                severity=meeting.severity,
                related=[
                    (meeting.mix.seen.node, "it meets the device here"),
                    *([(meeting.mix.cpu.bound, "named here")] if meeting.mix.cpu.bound else []),
                ],
            )  # fmt: skip
