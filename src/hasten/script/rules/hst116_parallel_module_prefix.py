"""HST116: weights are saved from inside a DataParallel wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.values import Dict, Module, Origin, ParameterOf, Value
from hasten.script.rules.file import File, Rule, first_of_each_line


class ParallelModulePrefix(Rule):
    """The weights of a wrapped model are saved under names that begin with `module.`.

    ## What it does

    Finds `torch.save` of the `state_dict()` of a model in `DataParallel` or
    `DistributedDataParallel`. It is a warning where the file also loads weights into a model that
    is not wrapped, and a suggestion elsewhere.

    ## Why is this bad?

    The plain model calls its weights `0.weight`, the file `module.0.weight`: loading fails with
    "Missing key(s) in state_dict".

    ## Bad

    ```python
    import torch
    from torch import nn

    net = nn.DataParallel(nn.Linear(4, 2))
    torch.save(net.state_dict(), "weights.pt")
    other = nn.Linear(4, 2)
    other.load_state_dict(torch.load("weights.pt", map_location="cpu"))
    ```

    ## Good

    ```python
    import torch
    from torch import nn

    net = nn.DataParallel(nn.Linear(4, 2))
    torch.save(net.module.state_dict(), "weights.pt")
    other = nn.Linear(4, 2)
    other.load_state_dict(torch.load("weights.pt", map_location="cpu"))
    ```

    ## Fix safety

    Checkpoints written before keep their old names.
    """

    code = "HST116"

    def check(self, file: File) -> Iterator[Finding]:
        """Saved wrappers."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        loads = [
            s for s in file.facts.of("method")
            if s.name == "load_state_dict" and isinstance(s.receiver, Module)
        ]  # fmt: skip
        plain = next(
            (
                s
                for s in loads
                if isinstance(s.receiver, Module) and "wraps" not in s.receiver.extra
            ),
            None,
        )
        for seen in file.facts.all("call", "torch.save"):
            owner, made = next(
                (
                    (o, node)
                    for o, node in states_in(seen.args[:1])
                    if isinstance(o, Module) and "wraps" in o.extra
                ),
                (None, None),
            )
            if owner is None:
                continue
            kind = owner.lib.rsplit(".", 1)[-1]
            related = (
                [(plain.node, "a model that is not wrapped is loaded here")]
                if plain is not None
                else []
            )
            yield self.finding(
                file, seen.node if made is None else made,
                f"the model {'may be' if owner.extra.get('maybe') else 'is'} wrapped in"
                f" {kind} here: every name in the file then begins with `module.`.",
                "save model.module.state_dict() when it is wrapped",
                severity="warning" if plain is not None else "suggestion",
                related=[*related, (seen.node, "it is saved here")],
            )  # fmt: skip


def owners_in(values: tuple[Value, ...]) -> list[object]:
    """Whose state the given values hold: modules, optimizers, scalers."""
    return [owner for owner, _ in states_in(values)]


def states_in(values: tuple[Value, ...]) -> list[tuple[Any, cst.CSTNode | None]]:
    """The states that values hold: whose each is, and the call of `state_dict` that made it."""
    found: list[tuple[Any, cst.CSTNode | None]] = []
    todo: list[Value] = list(values)
    for _ in range(100):
        if not todo:
            break
        one = todo.pop()
        if isinstance(one, Dict):
            if isinstance(one.origin, Origin) and one.origin.kind == "state":
                found.append((one.origin.owner, one.origin.node))
            else:
                todo += one.values()
        elif isinstance(one, ParameterOf):
            found.append((one.module, None))
    return found
