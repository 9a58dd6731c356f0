"""HST124: batches for a GPU from memory that is not pinned."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Const, Loader
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.hst123_loader_without_workers import feeds_training, uses_device


class LoaderNotPinned(Rule):
    """A loader that feeds a device gives batches in pageable memory.

    ## What it does

    Finds `DataLoader`s without `pin_memory` whose batches go to a device in a training loop. It is
    a suggestion: what it gains depends on the machine.

    ## Why is this bad?

    From pageable memory the copy takes longer, and cannot run beside the computation.

    ## Bad

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=8):
        optimizer.zero_grad()
        model(x.to(device)).mean().backward()
        optimizer.step()
    ```

    ## Good

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 3))
    for (x,) in DataLoader(data, batch_size=8, pin_memory=device.type == "cuda"):
        optimizer.zero_grad()
        model(x.to(device, non_blocking=True)).mean().backward()
        optimizer.step()
    ```

    ## Fix safety

    Safe; pinned memory cannot be swapped out.
    """

    code = "HST124"

    def check(self, file: File) -> Iterator[Finding]:
        """Loaders that do not pin."""
        if not uses_device(file):
            return iter(())
        return first_of_each_line(
            self.finding(
                file, seen.node, "batches go to the device from pageable memory.",
                'pin_memory=device.type == "cuda", and .to(device, non_blocking=True)',
            )
            for seen in file.facts.of("loader")
            if isinstance(seen.receiver, Loader)
            and not seen.receiver.extra.get("loose")
            and _unpinned(seen.receiver)
            and feeds_training(file, seen.receiver)
        )  # fmt: skip


def _unpinned(loader: Loader) -> bool:
    pin = loader.settings.get("pin_memory", Const(False))
    return isinstance(pin, Const) and not pin.value
