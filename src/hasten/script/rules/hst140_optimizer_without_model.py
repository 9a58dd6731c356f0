"""HST140: the optimizer holds parameters that the model no longer has."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Module, Optimizer
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.meetings import _contains


class OptimizerWithoutModel(Rule):
    """Part of the model is replaced after the optimizer was given its parameters.

    ## What it does

    Finds `model.head = nn.Linear(...)` after the optimizer was made from `model.parameters()`, with
    no optimizer made and no parameter group added after that; and a whole model made anew while the
    optimizer still holds the first.

    ## Why is this bad?

    The optimizer steps parameters that nothing uses; the new ones are never trained.

    ## Bad

    ```python
    import torch
    from torch import nn

    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 10)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = nn.Linear(4, 2)
    model.head(model.body(torch.randn(3, 4))).mean().backward()
    optimizer.step()
    ```

    ## Good

    ```python
    import torch
    from torch import nn

    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 10)})
    model.head = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head(model.body(torch.randn(3, 4))).mean().backward()
    optimizer.step()
    ```

    ## Fix safety

    Changes training: the new parameters are trained, as was meant.
    """

    code = "HST140"

    def check(self, file: File) -> Iterator[Finding]:
        """Optimizers of what is no more."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        if "add_param_group" in file.attributes():
            return
        order = file.facts.seen
        steps = [s for s in file.facts.of("step") if isinstance(s.receiver, Optimizer)]
        for index, seen in enumerate(order):
            if seen.kind != "optimizer" or not any(s.receiver is seen.receiver for s in steps):
                continue
            later = order[index + 1 :]
            change = self._replaced(seen, later) or self._made_anew(file, seen, later)
            if change is not None:
                yield self.finding(
                    file, seen.node,
                    f"the optimizer has parameters that line {file.line(change.node)}"
                    " replaces: the new ones are never trained.",
                    "make the optimizer after the model is complete",
                    related=[(change.node, "the model is changed here")],
                )  # fmt: skip

    def _replaced(self, made: Seen, later: list[Seen]) -> Seen | None:
        for index, seen in enumerate(later):
            value = seen.args[0] if seen.args else None
            owner = seen.receiver
            if (
                seen.kind != "store"
                or not isinstance(value, Module)
                or not isinstance(owner, Module)
            ):
                continue
            if seen.assumed or any(a.kind == "if" for a in seen.around):
                continue
            if "__init__" in [f.name for f in seen.inside] or not _trainable(value):
                continue
            whole = any(_contains(m, owner) for m in made.data["modules"])
            again = any(
                s.kind == "optimizer" and any(_contains(m, value) for m in s.data["modules"])
                for s in later[index:]
            )
            if whole and not again:
                return seen
        return None

    def _made_anew(self, file: File, made: Seen, later: list[Seen]) -> Seen | None:
        """A call of another model of the same class, while the optimizer's own is never called."""
        modules = made.data["modules"]
        classes = [m.cls for m in modules if m.cls is not None]
        calls = [s for s in file.facts.of("module-call") if isinstance(s.receiver, Module)]
        if made.assumed or len(modules) != 1 or not classes:
            return None
        for seen in calls:
            assert isinstance(seen.receiver, Module)
            if _contains(seen.receiver, modules[0]) or _contains(modules[0], seen.receiver):
                return None
        others = [s.data["modules"] for s in file.facts.of("optimizer") if s is not made]
        for seen in later:
            if (
                seen.kind == "module-call"
                and isinstance(seen.receiver, Module)
                and seen.receiver.cls is classes[0]
            ):
                held = any(_contains(m, seen.receiver) for group in others for m in group)
                return None if held or seen.under("no_grad") else seen
        return None


def _trainable(module: Module) -> bool:
    return "#place" in module.fields or any(
        isinstance(v, Module) and _trainable(v) for v in module.fields.values()
    )
