"""HST126: non_blocking copies from memory that is not pinned."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Const, Loader, Tensor
from hasten.script.rules.file import File, Rule, first_of_each_line


class NonBlockingUnpinned(Rule):
    """`non_blocking=True` for a copy that cannot be asynchronous.

    ## What it does

    Finds `.to(device, non_blocking=True)` of batches of a loader without `pin_memory`.

    ## Why is this bad?

    Only copies from pinned memory run beside the computation; this one waits as if the argument
    were not there.

    ## Bad

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=8):
        x = x.to(device, non_blocking=True)
    ```

    ## Good

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(torch.randn(64, 3))
    for (x,) in DataLoader(data, batch_size=8, pin_memory=device.type == "cuda"):
        x = x.to(device, non_blocking=True)
    ```

    ## Fix safety

    Safe.
    """

    code = "HST126"

    def check(self, file: File) -> Iterator[Finding]:
        """Arguments without effect."""
        return first_of_each_line(
            self.finding(
                file, seen.node,
                "non_blocking has no effect: the batch comes from a loader without"
                " pin_memory.",
                "pin_memory=True for the loader",
                related=[(loader.origin.node, "the loader is made here")] if loader.origin else [],
            )
            for seen in file.facts.of("tensor-move")
            if seen.data["non_blocking"]
            and seen.data["to"] == "dev"
            and (loader := _unpinned_loader(seen.receiver)) is not None
        )  # fmt: skip


def _unpinned_loader(value: object) -> Loader | None:
    """The loader without pinned memory that a batch comes from."""
    if not isinstance(value, Tensor) or value.origin is None or value.origin.kind != "batch":
        return None
    loader = value.origin.owner
    if not isinstance(loader, Loader) or loader.extra.get("loose"):
        return None
    pin = loader.settings.get("pin_memory", Const(False))
    return loader if isinstance(pin, Const) and not pin.value else None
