"""HST131: evaluation in training mode."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Module
from hasten.script.rules.file import File, Rule, first_of_each_line


class EvalMissing(Rule):
    """A model with dropout or batch normalisation is evaluated in training mode.

    ## What it does

    Finds calls under `no_grad` or `inference_mode`, outside the training step, of a model that has
    such layers and that is surely in training mode.

    ## Why is this bad?

    Dropout still drops and batch normalisation uses, and changes, the statistics of the batch:
    the figures are worse than the model, and differ from run to run.

    ## Bad

    ```python
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        guess = model(torch.randn(8, 4)).argmax(dim=1)
    ```

    ## Good

    ```python
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        guess = model(torch.randn(8, 4)).argmax(dim=1)
    ```

    ## Fix safety

    Call `model.train()` again before training goes on.
    """

    code = "HST131"

    def check(self, file: File) -> Iterator[Finding]:
        """Evaluation with dropout on."""
        trained = file.facts.of("optimizer")
        return first_of_each_line(
            self.finding(
                file, seen.node,
                f"the model is in training mode here: its {seen.data['layer']} is"
                " active.",
                "model.eval() before evaluating, model.train() after",
                severity="suggestion" if seen.assumed else "warning",
            )
            for seen in file.facts.of("module-call")
            if trained
            and isinstance(seen.receiver, Module)
            and seen.under("no_grad")
            and seen.step_loop() is None
            and seen.data.get("sensitive")
            and seen.data.get("mode") in ("unset", "train")
            and not any(f.name in ("forward", "__init__") for f in seen.inside)
            and any(s.data["modules"] and seen.receiver in s.data["modules"] for s in trained)
            and file.facts.of("backward")
        )  # fmt: skip
