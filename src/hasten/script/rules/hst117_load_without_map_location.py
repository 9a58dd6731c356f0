"""HST117: a checkpoint is loaded without saying where to."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Module, Unknown
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.hst116_parallel_module_prefix import owners_in


class LoadWithoutMapLocation(Rule):
    """`torch.load` without `map_location` puts tensors back on the device they were saved from.

    ## What it does

    Finds `torch.load(path)` without `map_location`. It is a warning where the file itself saves
    state from a device and loads it into a module, and a suggestion elsewhere.

    ## Why is this bad?

    On a machine without that device: "Attempting to deserialize object on a CUDA device". With it,
    the copy takes device memory that the model has already.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2).to(device)
    torch.save(model.state_dict(), "weights.pt")
    model.load_state_dict(torch.load("weights.pt"))
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 2).to(device)
    torch.save(model.state_dict(), "weights.pt")
    model.load_state_dict(torch.load("weights.pt", map_location=device))
    ```

    ## Fix safety

    Safe.
    """

    code = "HST117"

    def check(self, file: File) -> Iterator[Finding]:
        """Loads tied to a device."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        calls = [s for s in file.facts.all("call", "torch.load") if not s.data.get("loose")]
        careful = any("map_location" in s.kwargs or len(s.args) > 1 for s in calls)
        saved = _saved_from_device(file)
        for seen in calls:
            if "map_location" in seen.kwargs or len(seen.args) > 1:
                continue
            proven = saved is not None and not careful and _into_module(file, seen)
            related = (
                [(saved.node, "state on the device is saved here")] if saved is not None else []
            )
            yield self.finding(
                file, seen.node,
                "this loads tensors onto the device they were saved from; without that"
                " device it fails.",
                "torch.load(path, map_location=device)",
                severity="warning" if proven else "suggestion", related=related,
            )  # fmt: skip


def _saved_from_device(file: File) -> Seen | None:
    """A save of a module that the file has moved to the device."""
    moved = {id(s.receiver) for s in file.facts.of("move") if s.data.get("place") == "dev"}
    for seen in file.facts.all("call", "torch.save"):
        for owner in owners_in(seen.args[:1]):
            inner = owner.extra.get("wraps", owner) if isinstance(owner, Module) else None
            if id(owner) in moved or id(inner) in moved:
                return seen
    return None


def _into_module(file: File, load: Seen) -> bool:
    for seen in file.facts.of("method"):
        if seen.name == "load_state_dict" and seen.args:
            value = seen.args[0]
            if (
                isinstance(value, Unknown)
                and value.origin is not None
                and value.origin.node is load.node
            ):
                return True
    return False
