"""HST135: a checkpoint without the scaler's state."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.values import Optimizer, Scaler, Unknown
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.hst116_parallel_module_prefix import owners_in, states_in


class ScalerNotSaved(Rule):
    """The checkpoint holds model and optimizer, but not the gradient scaler.

    ## What it does

    Finds `torch.save` of an optimizer's state in a script that trains with a `GradScaler` whose
    `state_dict()` is not in the file. It is a warning where the script also resumes.

    ## Why is this bad?

    After a resume the loss scale starts again at its default, and the first steps overflow and are
    skipped: the run is not the one that was interrupted.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(model(torch.randn(8, 4, device=device)).mean()).backward()
    scaler.step(optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    saved = torch.load("run.pt", map_location=device)
    optimizer.load_state_dict(saved["optimizer"])
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(model(torch.randn(8, 4, device=device)).mean()).backward()
    scaler.step(optimizer)
    torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "run.pt")
    saved = torch.load("run.pt", map_location=device)
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    ```

    ## Fix safety

    Older checkpoints have no such entry: load it where it is there.
    """

    code = "HST135"

    def check(self, file: File) -> Iterator[Finding]:
        """Checkpoints without a scaler."""
        return first_of_each_line(self._all(file))

    def _plainly(self, file: File) -> bool:
        """Whether no load of state is of something unknown, which might be the scaler."""
        return all(
            not isinstance(s.receiver, Unknown)
            for s in file.facts.of("method")
            if s.name == "load_state_dict"
        )

    def _all(self, file: File) -> Iterator[Finding]:
        used = [s for s in file.facts.of("scaler") if s.name == "step"]
        if not used:
            return
        resumes = any(
            s.name == "load_state_dict" and isinstance(s.receiver, Optimizer)
            for s in file.facts.of("method")
        )
        loads = [s for s in file.facts.of("optimizer-load") if not s.assumed]
        restored = any(s.name == "load_state_dict" for s in file.facts.of("scaler"))
        kept = any(
            isinstance(o, Scaler)
            for s in file.facts.all("call", "torch.save")
            for o in owners_in(s.args[:1])
        )
        if loads and kept and not restored and self._plainly(file):
            yield self.finding(
                file,
                loads[0].node,
                "the optimizer's state is loaded here, the gradient scaler's nowhere.",
                'scaler.load_state_dict(saved["scaler"]) too',
                related=[(used[0].node, "the scaler is used here")],
            )
        for seen in file.facts.all("call", "torch.save"):
            states = states_in(seen.args[:1])
            made = [node for o, node in states if isinstance(o, Optimizer) and node is not None]
            if made and not any(isinstance(o, Scaler) for o, _ in states):
                yield self.finding(
                    file, seen.node,
                    "the checkpoint has the optimizer's state but not the gradient"
                    " scaler's.",
                    'save "scaler": scaler.state_dict() too, and load it when resuming',
                    severity="warning" if resumes else "suggestion",
                    related=[
                        *((node, "the optimizer's state") for node in made),
                        *((load.node, "it is loaded here") for load in loads),
                        (used[0].node, "the scaler is used here"),
                    ],
                )  # fmt: skip
