"""HST114: a data set works on the device."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding, Severity
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Const, Loader, Tensor, Unknown
from hasten.script.rules.file import File, Rule, first_of_each_line

_IN_WORKERS = ("__getitem__", "__getitems__", "__iter__")


class DeviceWorkInDataset(Rule):
    """Samples are put on the device inside the data set.

    ## What it does

    Finds moves to the device, and tensors made there, in `__getitem__` of a data set or in a
    loader's `collate_fn`. With `num_workers` above 0 it is an error; without workers a warning.

    ## Why is this bad?

    Loader workers are forked processes, in which CUDA cannot be used: "Cannot re-initialize CUDA in
    forked subprocess". Without workers it copies sample by sample, which is slow.

    ## Bad

    ```python
    import torch
    from torch.utils.data import DataLoader, Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


    class Points(Dataset):
        def __init__(self):
            self.x = torch.randn(64, 3)

        def __len__(self):
            return 64

        def __getitem__(self, i):
            return self.x[i].to(device)


    for batch in DataLoader(Points(), batch_size=8, num_workers=2):
        print(batch.shape)
    ```

    ## Good

    ```python
    import torch
    from torch.utils.data import DataLoader, Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


    class Points(Dataset):
        def __init__(self):
            self.x = torch.randn(64, 3)

        def __len__(self):
            return 64

        def __getitem__(self, i):
            return self.x[i]


    for batch in DataLoader(Points(), batch_size=8, num_workers=2):
        batch = batch.to(device)
    ```

    ## Fix safety

    Safe: the values are the same.
    """

    code = "HST114"

    def check(self, file: File) -> Iterator[Finding]:
        """Device work for single samples."""
        return first_of_each_line(sorted(self._all(file), key=lambda f: (f.line, f.severity)))

    def _all(self, file: File) -> Iterator[Finding]:
        inside = list(self._inside(file))
        for seen, loader in inside:
            severity, why = _severity(loader)
            related = [(loader.node, "the loader is made here")] if loader is not None else []
            yield self.finding(
                file, seen.node,
                f"`{file.short(seen.node)}` works on the device for each sample,"
                f" {why}",
                "return CPU tensors and move the whole batch in the training loop",
                severity=severity, related=related,
            )  # fmt: skip
        if inside:
            return
        told: dict[int, list[Seen]] = {}
        for seen in file.facts.all("loader-dev"):
            if _workers(seen) or _pins(seen):
                told.setdefault(id(seen.node), []).append(seen)
        for group in told.values():
            yield self._resident(file, group)

    def _resident(self, file: File, group: list[Seen]) -> Finding:
        """A loader whose data set holds tensors of the device: one finding for all of them."""
        loader = group[0]
        nodes = [
            tensor.origin.node
            for seen in group
            if isinstance(tensor := seen.args[0], Tensor) and tensor.origin is not None
        ]
        nodes.sort(key=file.line)
        why = (
            "loader workers are forked processes, in which CUDA cannot be used."
            if _workers(loader)
            else "and pin_memory takes CPU tensors only."
        )
        return self.finding(
            file,
            nodes[0] if nodes else loader.node,
            f"the data set holds tensors on the device; {why}",
            "keep the data set on the CPU and move each batch, or use no workers and no pinning",
            related=[
                (loader.node, "the loader is made here"),
                *((node, "this one is on the device too") for node in nodes[1:]),
            ],
        )

    def _inside(self, file: File) -> Iterator[tuple[Seen, Seen | None]]:
        loaders = {id(s.node): s for s in file.facts.all("loader")}
        for seen in file.facts.of("tensor-move", "unknown-move", "factory"):
            yield from self._placed(seen, loaders)

    def _placed(self, seen: Seen, loaders: dict[int, Seen]) -> Iterator[tuple[Seen, Seen | None]]:
        target = seen.data.get("to") or (
            seen.result.place if isinstance(seen.result, Tensor) else None
        )
        if target != "dev":
            return
        around = next((a for a in seen.around if a.kind == "dataset"), None)
        method = any(
            f.name in _IN_WORKERS and f.owner is not None and f.owner.is_dataset()
            for f in seen.inside
        )
        if around is not None:
            yield seen, loaders.get(id(around.node))
        elif method:
            yield seen, None


def _workers(loader: Seen) -> bool:
    holder = loader.receiver
    settings = holder.settings if isinstance(holder, Loader) else {}
    workers = settings.get("num_workers", Const(0))
    return isinstance(workers, Unknown) or (isinstance(workers, Const) and bool(workers.value))


def _pins(loader: Seen) -> bool:
    holder = loader.receiver
    settings = holder.settings if isinstance(holder, Loader) else {}
    pin = settings.get("pin_memory")
    return isinstance(pin, Const) and pin.value is True


def _severity(loader: Seen | None) -> tuple[Severity, str]:
    if loader is None:
        return "warning", "which fails in loader workers and is slow without them."
    if _workers(loader):
        return "error", "in loader workers: forked processes, in which CUDA cannot be used."
    if _pins(loader):
        return "error", "and pin_memory takes CPU tensors only."
    return "warning", "one small copy a sample; with loader workers it fails."


__all__ = ["DeviceWorkInDataset", "cst"]
