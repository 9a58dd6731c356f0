"""HST132: evaluation that builds graphs."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.facts import Loop
from hasten.script.flow.values import Loader, Module
from hasten.script.rules.file import File, Rule, first_of_each_line


class NoGradMissing(Rule):
    """A model in evaluation mode is called with graphs switched on.

    ## What it does

    Finds loops over a loader without a backward pass that call a model after `model.eval()` and
    outside `torch.no_grad()` or `torch.inference_mode()`. It is a suggestion: the results are
    right.

    ## Why is this bad?

    Every call keeps its activations until its result is gone: more memory, and slower.

    ## Bad

    ```python
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1))
    model.eval()
    hits = 0
    for (x,) in DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4):
        hits += model(x).argmax(dim=1).sum()
    ```

    ## Good

    ```python
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1))
    model.eval()
    hits = 0
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4):
            hits += model(x).argmax(dim=1).sum()
    ```

    ## Fix safety

    Safe where nothing calls backward.
    """

    code = "HST132"

    def check(self, file: File) -> Iterator[Finding]:
        """Evaluation with graphs."""
        return first_of_each_line(
            self.finding(
                file, seen.node, "the model is evaluated here with graphs switched on.",
                "with torch.no_grad(): around the loop",
            )
            for seen in file.facts.of("module-call")
            if isinstance(seen.receiver, Module)
            and seen.data.get("mode") == "eval"
            and not seen.under("no_grad")
            and not seen.under("no_grad?")
            and _evaluates(seen.loops())
            and not any(f.name == "forward" for f in seen.inside)
            and "autograd" not in file.attributes()
        )  # fmt: skip


def _evaluates(loops: list[Loop]) -> bool:
    """Whether the innermost loop over a loader has no backward pass."""
    over = [index for index, loop in enumerate(loops) if isinstance(loop.over, Loader)]
    return bool(over) and not any(loop.has_backward for loop in loops[over[-1] :])
