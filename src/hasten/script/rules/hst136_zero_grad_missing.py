"""HST136: gradients that nobody clears."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Optimizer
from hasten.script.rules.file import File, Rule, first_of_each_line


class ZeroGradMissing(Rule):
    """An optimizer steps in a loop, and nothing clears the gradients.

    ## What it does

    Finds training loops with `backward()` and `optimizer.step()` in a file without any
    `zero_grad()` and without `p.grad = None`.

    ## Why is this bad?

    `backward()` adds to the gradients that are there: each step uses the sum of all steps before.

    ## Bad

    ```python
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
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

    Changes training, to what was meant.
    """

    code = "HST136"

    def check(self, file: File) -> Iterator[Finding]:
        """Gradients that pile up."""
        if {"zero_grad", "grad"} & file.attributes():
            return iter(())
        return first_of_each_line(
            self.finding(
                file, loop.backward[0],
                "nothing clears the gradients in the loop on line"
                f" {file.line(loop.node)}: they pile up.",
                "optimizer.zero_grad() in each step",
                related=[
                    (seen.node, "the optimizer steps here"),
                    (loop.node, "the training loop"),
                ],
            )
            for seen in file.facts.of("step")
            if isinstance(seen.receiver, Optimizer) and (loop := seen.step_loop()) is not None
        )  # fmt: skip
