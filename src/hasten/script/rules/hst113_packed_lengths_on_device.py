"""HST113: sequences are packed with lengths on the device."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
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
        return first_of_each_line(
            self.finding(
                file, seen.node, "the lengths are on the device; packing needs them on the CPU.",
                "leave the lengths on the CPU, or pass lengths.cpu()",
                severity="warning" if seen.assumed else "error",
            )
            for seen in file.facts.all("packed")
        )  # fmt: skip
