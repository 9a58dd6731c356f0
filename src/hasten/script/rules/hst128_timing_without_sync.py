"""HST128: device work is timed without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Tensor, Unknown
from hasten.script.rules.file import File, Rule, first_of_each_line


class TimingWithoutSync(Rule):
    """The clock is read after device work was asked for, not after it was done.

    ## What it does

    Finds `time.perf_counter() - start` around calls of modules on the device or backward passes
    with nothing between that waits for the device (`synchronize`, `.item()`, `.cpu()`, a print).

    ## Why is this bad?

    Operations on a GPU are queued: the difference is the time of asking, often ten times less than
    the work.

    ## Bad

    ```python
    import time

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(512, 512).to(device)
    x = torch.randn(64, 512, device=device)
    start = time.perf_counter()
    y = model(x)
    print(time.perf_counter() - start)
    ```

    ## Good

    ```python
    import time

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(512, 512).to(device)
    x = torch.randn(64, 512, device=device)
    start = time.perf_counter()
    y = model(x)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(time.perf_counter() - start)
    ```

    ## Fix safety

    Waiting in each step slows training; do it where you measure.
    """

    code = "HST128"

    def check(self, file: File) -> Iterator[Finding]:
        """Times of asking."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        order = file.facts.seen
        for index, seen in enumerate(order):
            if (
                seen.kind != "elapsed"
                or not isinstance(seen.receiver, Unknown)
                or seen.receiver.origin is None
            ):
                continue
            clock = seen.receiver.origin.node
            starts = [i for i in range(index) if order[i].kind == "call" and order[i].node is clock]
            if not starts:
                continue
            between = order[starts[-1] : index]
            work = next((s for s in between if _is_work(s)), None)
            if work is None or any(_waits(s) for s in between):
                continue
            yield self.finding(
                file, seen.node,
                "between the two readings of the clock the device is given work (line"
                f" {file.line(work.node)}) and nothing waits for it.",
                "torch.accelerator.synchronize() (or torch.cuda.synchronize()) before"
                " reading the clock",
                related=[(clock, "the clock is started here"), (work.node, "device work")],
            )  # fmt: skip


def _is_work(seen: Seen) -> bool:
    if seen.kind == "module-call":
        return seen.data.get("place") == "dev"
    return (
        seen.kind == "backward"
        and isinstance(seen.receiver, Tensor)
        and seen.receiver.place == "dev"
    )


def _waits(seen: Seen) -> bool:
    return (
        seen.kind in ("sync", "numpy")
        or "synchronize" in seen.name
        or seen.name in ("wait", "elapsed_time")
    )
