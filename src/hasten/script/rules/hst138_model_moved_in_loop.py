"""HST138: the model is moved in the training step."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Module
from hasten.script.rules.file import File, Rule, called_from, first_of_each_line


class ModelMovedInLoop(Rule):
    """`model.to(device)` in every step.

    ## What it does

    Finds moves of a module that run in each round of a training loop and made outside of it.

    ## Why is this bad?

    After the first it does nothing, but goes through every parameter to find that out; where it
    moves back and forth, it copies the whole model.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        model.to(device)
        optimizer.zero_grad()
        model(torch.randn(8, 4, device=device)).mean().backward()
        optimizer.step()
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4, device=device)).mean().backward()
        optimizer.step()
    ```

    ## Fix safety

    Safe.
    """

    code = "HST138"

    def check(self, file: File) -> Iterator[Finding]:
        """Moves in the step."""
        yield from first_of_each_line([*self._each_step(file), *self._to_and_fro(file)])

    def _to_and_fro(self, file: File) -> Iterator[Finding]:
        """Moved to the device and back within one round of a training loop."""
        moves = file.facts.of("move")
        for back in moves:
            loop = next((one for one in reversed(back.loops()) if one.has_backward), None)
            if back.data["place"] != "cpu" or loop is None:
                continue
            there = next(
                (
                    s
                    for s in moves
                    if s.receiver is back.receiver
                    and s.data["place"] == "dev"
                    and loop in s.loops()
                ),
                None,
            )
            if there is not None:
                yield self.finding(
                    file, there.node,
                    "the model goes to the device here and back on line"
                    f" {file.line(back.node)}, in every round of a loop.",
                    "leave it on the device, and move what it is evaluated on",
                    related=[(back.node, "it goes back here"), (loop.node, "the loop")],
                )  # fmt: skip

    def _each_step(self, file: File) -> Iterator[Finding]:
        return (
            self.finding(
                file, seen.node,
                "the model is moved in every step of the loop on line"
                f" {file.line(loop.node)}.",
                "move it once, before the loop",
                related=[*called_from(file, seen, loop), (loop.node, "the training loop")],
            )
            for seen in file.facts.of("move")
            if isinstance(seen.receiver, Module)
            and (loop := seen.step_loop()) is not None
            and seen.every_round_of(loop)
            and (seen.receiver.origin is None or loop not in seen.receiver.origin.loops)
            and "#place" in {k for m in (seen.receiver, *_parts(seen.receiver)) for k in m.fields}
        )  # fmt: skip


def _parts(module: Module) -> list[Module]:
    return [v for v in module.fields.values() if isinstance(v, Module)]
