"""HST127: a value is read on the host before its copy has arrived."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class NonBlockingToHost(Rule):
    """A non-blocking copy to the host is read without waiting for it.

    ## What it does

    Finds `x.to("cpu", non_blocking=True)` that `.numpy()`, `.item()`, `print` or `float` reads with
    no synchronisation between.

    ## Why is this bad?

    The copy may still be under way: the host reads what was in that memory before. Nothing fails;
    the numbers are wrong now and then.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    y = x.to("cpu", non_blocking=True)
    print(y.numpy())
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    y = x.to("cpu")
    print(y.numpy())
    ```

    ## Fix safety

    Safe.
    """

    code = "HST127"

    def check(self, file: File) -> Iterator[Finding]:
        """Reads that come too early."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        order = file.facts.seen
        for seen in file.facts.of("early"):
            move = seen.data["move"]
            end = order.index(seen)
            start = max((i for i, s in enumerate(order[:end]) if s.node is move), default=0)
            if any("synchronize" in s.name or s.name == "wait" for s in order[start:end]):
                continue
            yield self.finding(
                file, seen.node,
                f"this reads on the host what line {file.line(move)} copies with"
                " non_blocking=True, perhaps before it is there.",
                "leave out non_blocking for copies to the host, or synchronize before reading",
                related=[(move, "the copy is started here")],
            )  # fmt: skip
