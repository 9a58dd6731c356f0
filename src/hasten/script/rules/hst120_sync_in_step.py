"""HST120: the training step waits for the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding, Severity
from hasten.script.flow import tables
from hasten.script.flow.facts import Loop, Seen
from hasten.script.flow.values import Optimizer, Tensor
from hasten.script.needs import needed
from hasten.script.rules.file import File, Rule, called_from, first_of_each_line

_SCALARS = (".item()", "float(...)", "int(...)")


class SyncInStep(Rule):
    """Each training step reads a value of the device on the host.

    ## What it does

    Finds `.item()`, `.cpu()`, `.tolist()`, `float(loss)`, `print(loss)`, f-strings and conditions
    on device tensors that run in every round of a training loop. What runs every N steps, under a
    condition, is not reported. One running total, `total += loss.item()`, as the only wait of the
    step is a suggestion.

    ## Why is this bad?

    The host waits until the device has done everything asked so far, and the device then waits for
    the host: nothing overlaps, and small models run at a fraction of their speed.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        loss = model(torch.randn(8, 4, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        loss = model(torch.randn(8, 4, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())
    ```

    ## Fix safety

    Logs fewer values, or the same ones later.
    """

    code = "HST120"

    def check(self, file: File) -> Iterator[Finding]:
        """Waits in the step."""
        return first_of_each_line(
            sorted(self._all(file), key=lambda f: (f.line, f.severity != "warning"))
        )

    def _all(self, file: File) -> Iterator[Finding]:
        waits: list[tuple[Seen, Loop]] = []
        for seen in file.facts.of("sync"):
            loop = seen.step_loop()
            if (
                loop is not None
                and not _steps_with_closure(file, loop)
                and seen.every_round_of(loop)
                and not seen.under("dataset")
            ):
                waits.append((seen, loop))
        shown = _shown(file)
        for seen, loop in waits:
            lines = {file.line(s.node) for s, other in waits if other.node is loop.node}
            severity = _severity(file, seen, len(lines), shown)
            how = seen.name if seen.name.startswith(".") else f"{seen.name} of a device tensor"
            yield self.finding(
                file, seen.node,
                f"{how} waits for the device in every step of the loop on line"
                f" {file.line(loop.node)}.",
                "keep values on the device (total += loss.detach()) and read them every N"
                " steps, or once an epoch",
                severity=severity,
                related=[*called_from(file, seen, loop), (loop.node, "the training loop")],
            )  # fmt: skip


def _steps_with_closure(file: File, loop: Loop) -> bool:
    """Whether the optimizer is L-BFGS, which reads the loss on the host many times a step."""
    return any(
        isinstance(s.receiver, Optimizer) and s.receiver.lib.endswith("LBFGS") and loop in s.loops()
        for s in file.facts.of("step")
    )


def _shown(file: File) -> list[cst.CSTNode]:
    """Calls that print or log."""
    found = [s.node for s in file.facts.all("call", "builtins.print")]
    found += [s.node for s in file.facts.of("call") if s.name.startswith("logging.")]
    for seen in file.facts.of("method"):
        if seen.name in tables.LOG_CALLS or seen.name in (
            "add_scalar",
            "set_postfix",
            "set_description",
            "write",
        ):
            found.append(seen.node)
    return found


def _severity(file: File, seen: Seen, waits: int, shown: list[cst.CSTNode]) -> Severity:
    if "step" not in file.attributes():
        return "suggestion"  # gradients of a finished model: no optimizer waits
    if not _of_a_loss(seen) and needed(syntax(file), file.line(seen.node)):
        return "suggestion"
    if seen.name in _SCALARS and not any(file.holds(node, seen.node) for node in shown):
        if _decides(file, seen):
            return "warning"
        total = any(
            s.kind == "augment" and file.holds(s.node, seen.node) for s in file.facts.of("augment")
        )
        if waits == 1 or (not total and _given_away(file, seen)):
            return "suggestion"
    return "warning"


def _decides(file: File, seen: Seen) -> bool:
    """Whether the value is read for a condition."""
    if "tests" not in file.shared:
        branches = (cst.If, cst.While, cst.IfExp, cst.Assert)
        file.shared["tests"] = [n.test for n in file.positions if isinstance(n, branches)]
    return any(file.holds(test, seen.node) for test in file.shared["tests"])


def _given_away(file: File, seen: Seen) -> bool:
    """Whether the value goes to some function of the script or a library, which may need it."""
    others = file.facts.of("unknown-call", "method")
    return any(s.node is not seen.node and file.holds(s.node, seen.node) for s in others)


def _of_a_loss(seen: Seen) -> bool:
    """Whether what is read is one number with a graph."""
    return isinstance(seen.receiver, Tensor) and seen.receiver.graph and not seen.receiver.ndim


def syntax(file: File) -> ast.Module:
    """The file as Python's own parser has it."""
    if "syntax" not in file.shared:
        try:
            file.shared["syntax"] = ast.parse(file.module.code)
        except SyntaxError:  # of a newer Python than this one
            file.shared["syntax"] = ast.Module([], [])
    return file.shared["syntax"]  # type: ignore[no-any-return]
