"""HST113: sequences are packed with lengths on the device."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.values import Tensor, Value
from hasten.script.rules.file import File, Rule, first_of_each_line


class PackedLengthsOnDevice(Rule):
    """`pack_padded_sequence` gets its lengths on the device.

    ## What it does

    Finds `pack_padded_sequence(x, lengths)` whose lengths were moved to the device.

    ## Why is this bad?

    It reads the lengths on the host and refuses others: "'lengths' argument should be a 1D CPU
    int64 tensor".

    ## Bad

    ```python
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(2, 5, 3, device=device)
    lengths = torch.tensor([5, 3]).to(device)
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    ```

    ## Good

    ```python
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(2, 5, 3, device=device)
    lengths = torch.tensor([5, 3])
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    ```

    ## Fix safety

    Safe; `lengths.cpu()` waits for the device, leaving them on the CPU does not.
    """

    code = "HST113"

    def check(self, file: File) -> Iterator[Finding]:
        """Lengths on the device."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.all("packed"):
            given = _given(seen.node)
            yield self.finding(
                file, seen.node if given is None else given,
                "the lengths are on the device; packing needs them on the CPU.",
                "leave the lengths on the CPU, or pass lengths.cpu()",
                severity="warning" if seen.assumed else "error",
                related=[(seen.node, "they are packed here"), *_origin(seen.receiver)],
            )  # fmt: skip


def _given(call: cst.CSTNode) -> cst.CSTNode | None:
    """The argument that gives the lengths."""
    if not isinstance(call, cst.Call):
        return None
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == "lengths":
            return argument.value
    second = call.args[1] if len(call.args) > 1 else None
    return second.value if second is not None and second.keyword is None else None


def _origin(lengths: Value | None) -> Iterator[tuple[cst.CSTNode, str]]:
    """Where the lengths came to the device."""
    if isinstance(lengths, Tensor):
        node = lengths.bound or (lengths.origin.node if lengths.origin is not None else None)
        if node is not None:
            yield node, "they came to the device here"
