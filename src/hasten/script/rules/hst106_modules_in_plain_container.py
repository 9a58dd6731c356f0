"""HST106: modules in a list or dict that their owner does not know of."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Dict, Module
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import _contains, meetings, modules_in


class ModulesInPlainContainer(Rule):
    """Modules are kept in a plain list or dict, where their owner cannot see them.

    ## What it does

    Finds an attribute of a module that is a list, tuple or dict with modules made for it, and no
    `ModuleList`, `ModuleDict` or `Sequential` that holds the same modules.

    ## Why is this bad?

    They are not in `parameters()`: the optimizer does not train them, `.to(device)` does not move
    them, and `state_dict()` does not save them.

    ## Bad

    ```python
    from torch import nn


    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = [nn.Linear(8, 2) for _ in range(3)]

        def forward(self, x):
            return [head(x) for head in self.heads]
    ```

    ## Good

    ```python
    from torch import nn


    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

        def forward(self, x):
            return [head(x) for head in self.heads]
    ```

    ## Fix safety

    Changes training (the modules are now trained) and adds keys to `state_dict()`: that is what
    the script was meant to do.
    """

    code = "HST106"

    def check(self, file: File) -> Iterator[Finding]:
        """Lists and dicts with modules."""
        met = {id(m.node): m for m in meetings(file, self.code)}
        done = set()
        for seen in file.facts.all("store"):
            owner = seen.receiver
            if not isinstance(owner, Module) or not seen.args or id(seen.node) in done:
                continue
            inside = "__init__" in [f.name for f in seen.inside]
            own = [
                m
                for m in modules_in(seen.args[0])
                if inside and self._made_here(owner, m, seen.calls)
            ]
            own = [m for m in own if not _contains(owner, m) and _has_parameters(m)]
            if not own:
                continue
            done.add(id(seen.node))
            better = "nn.ModuleDict" if isinstance(seen.args[0], Dict) else "nn.ModuleList"
            cls = owner.cls.name if owner.cls is not None else "the module"
            meeting = met.get(id(seen.node))
            related = (
                [(meeting.mix.seen.node, "they meet the device here")]
                if meeting is not None
                else []
            )
            yield self.finding(
                file, seen.node,
                f"`self.{seen.name}` of {cls} holds modules in a plain"
                f" {'dict' if better.endswith('Dict') else 'list'}:"
                " they are not moved, not trained and not saved with it.",
                f"self.{seen.name} = {better}(...)",
                related=related,
            )  # fmt: skip

    def _made_here(self, owner: Module, module: Module, calls: tuple[object, ...]) -> bool:
        """Whether the module was made while the owner was, rather than given to it."""
        origin = module.origin
        return (
            origin is not None
            and len(origin.calls) >= len(calls)
            and origin.calls[: len(calls)] == calls
        )


def _has_parameters(module: Module) -> bool:
    todo, done = [module], set()
    while todo:
        one = todo.pop()
        if id(one) in done:
            continue
        done.add(id(one))
        if "#place" in one.fields or any(
            getattr(v, "registered", False) for v in one.fields.values()
        ):
            return True
        todo += [v for v in one.fields.values() if isinstance(v, Module)]
    return False
