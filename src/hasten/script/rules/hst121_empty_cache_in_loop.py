"""HST121: the memory cache is emptied in the training loop."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, called_from, first_of_each_line

_CALLS = ("torch.cuda.empty_cache", "torch.accelerator.empty_cache", "torch.mps.empty_cache",
          "torch.xpu.empty_cache", "torch.accelerator.memory.empty_cache")  # fmt: skip


class EmptyCacheInLoop(Rule):
    """`empty_cache()` in every training step.

    ## What it does

    Finds `torch.cuda.empty_cache()` in a training loop: a warning where it runs in each step, a
    suggestion where it runs once an epoch or under a condition.

    ## Why is this bad?

    It waits for the device and gives memory back to the driver, which the next step must ask for
    again. It frees nothing that the next step could not have used anyway.

    ## Bad

    ```python
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        torch.cuda.empty_cache()
    ```

    ## Good

    ```python
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
    ```

    ## Fix safety

    Safe; figures of reserved memory (as nvidia-smi shows them) grow.
    """

    code = "HST121"

    def check(self, file: File) -> Iterator[Finding]:
        """Emptied caches."""
        return first_of_each_line(
            sorted(self._all(file), key=lambda f: (f.line, f.severity != "warning"))
        )

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.all("call", *_CALLS):
            loops = [loop for loop in seen.loops() if loop.has_backward]
            if not loops:
                continue
            step = seen.step_loop()
            each = step is not None and seen.every_round_of(step)
            loop = step if each and step is not None else loops[-1]
            yield self.finding(
                file, seen.node,
                f"the cache is emptied {'in every step of' if each else 'within'} the loop"
                f" on line {file.line(loop.node)}.",
                "remove it; PyTorch reuses cached memory by itself",
                severity="warning" if each else "suggestion",
                related=[*called_from(file, seen, loop), (loop.node, "the loop")],
            )  # fmt: skip
