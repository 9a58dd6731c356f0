"""HST109: part of a batch is still on the CPU when it is used."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class BatchNotMoved(Rule):
    """A tensor from the loader is used on the device without having been moved.

    ## What it does

    Follows what comes out of a `DataLoader` (through tuples, dicts, lists and the classes of the
    script) to the model, the loss or an operation on the device.

    ## Why is this bad?

    A loader gives tensors on the CPU. What is not moved fails where it meets the device.

    ## Bad

    ```python
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(3, 2).to(device)
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)))
    for x, y in loader:
        x = x.to(device)
        loss = nn.functional.cross_entropy(model(x), y)
    ```

    ## Good

    ```python
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(3, 2).to(device)
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)))
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(model(x), y)
    ```

    ## Fix safety

    Safe.
    """

    code = "HST109"

    def check(self, file: File) -> Iterator[Finding]:
        """What was left of a batch."""
        for meeting in meetings(file, self.code):
            use = meeting.mix.seen.node
            related = [(use, f"{meeting.mix.what} meets the device here")]
            if meeting.origin is not None:
                related.append((meeting.origin.node, "the batch comes from here"))
            if meeting.extra is not None:
                message = (
                    "a part of the batch is moved here, another is not: it meets the"
                    f" device on line {file.line(use)}."
                )
            else:
                message = (
                    f"{meeting.mix.what} gets a tensor of the batch that is still on the"
                    " CPU, and one on the device."
                )
            yield self.finding(
                file, meeting.node, message, "move every tensor of the batch to the device",
                severity=meeting.severity, related=related,
            )  # fmt: skip
