"""HST137: tensors made on the CPU and moved in each step."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Tensor
from hasten.script.rules.file import File, Rule, first_of_each_line


class MadeOnCpuThenMoved(Rule):
    """A tensor is made on the CPU and moved at once, in every step.

    ## What it does

    Finds `torch.zeros(...).to(device)` and the like in a training loop. It is a suggestion.

    ## Why is this bad?

    Making it on the device costs one launch; making it on the CPU costs the work and a copy, for
    which the host waits.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        noise = torch.randn(8, 4).to(device)
        optimizer.zero_grad()
        model(noise).mean().backward()
        optimizer.step()
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        noise = torch.randn(8, 4, device=device)
        optimizer.zero_grad()
        model(noise).mean().backward()
        optimizer.step()
    ```

    ## Fix safety

    Random numbers come from the device's generator: other numbers from the same seed.
    """

    code = "HST137"

    def check(self, file: File) -> Iterator[Finding]:
        """Made here, used there."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.of("tensor-move"):
            loop = seen.step_loop()
            value = seen.receiver
            if (
                loop is None
                or not isinstance(value, Tensor)
                or value.origin is None
                or seen.under("dataset")
            ):
                continue
            if (
                seen.data["to"] != "dev"
                or seen.data["from"] != "cpu"
                or value.origin.kind != "factory"
            ):
                continue
            direct = file.holds(seen.node, value.origin.node)
            if (
                direct
                and value.origin.name not in ("tensor", "from_numpy", "as_tensor")
                and loop in value.origin.loops
            ):
                yield self.finding(
                    file, seen.node,
                    f"`{file.short(value.origin.node)}` is made on the CPU and copied"
                    " in every step.",
                    "make it on the device: device=device",
                )  # fmt: skip
