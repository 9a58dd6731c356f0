"""Waits and copies inside the step: where the host asks the device, and what it sends each time."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from hasten.script.needs import needed
from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.loops import Loop, Loops
from hasten.script.rehearsal.origins import Origin, Origins
from hasten.script.rehearsal.places import Place, Stack, Territory, callers, source_line, tree

_T = torch.Tensor
WAITS: dict[Any, str] = {
    _T.item: ".item()",
    _T.tolist: ".tolist()",
    _T.cpu: ".cpu()",
    _T.__float__: "float()",
    _T.__int__: "int()",
    _T.__bool__: "the truth of a tensor",
    _T.__index__: "an index from a tensor",
    _T.__repr__: "printing a tensor",
    _T.__format__: "formatting a tensor",
    _T.nonzero: ".nonzero()",
}
_THROUGH = ("_tensor.py", "overrides.py", "_tensor_str.py", "_trace_wrapped_higher_order_op.py")
_TURNS = 2  # turns between steps in which a wait must be seen
_CALLERS = 2  # calls on the way to a wait that a finding names
_SMALL = 4096  # bytes of a copy that are not worth a word


_Wait = tuple[str, int, str, bool]  # file, line, what waits, whether it is a suggestion alone


class _Turn:
    """From one step of an optimizer to its next."""

    def __init__(self, loop: Loop | None, events: int, calls: int) -> None:
        self.loop, self.events, self.calls = loop, events, calls
        self.made: set[tuple[str, int]] = set()  # lines that move what was made in this turn
        self.waits: Counter[_Wait] = Counter()


class Waits:
    """Counts by line, between one step and the next of one optimizer."""

    def __init__(
        self, territory: Territory, origins: Origins, collected: Collected, loops: Loops
    ) -> None:
        self._territory, self._origins, self._collected = territory, origins, collected
        self._loops = loops
        origins.on_move = self._moved
        self._made: dict[tuple[str, int], Counter[tuple[str, int]]] = defaultdict(Counter)
        # What was seen since the last step of each optimizer, and the call that steps it.
        self._now: dict[int, _Turn] = {}
        # By the line that steps: turns in all, and the counts of each line in each turn.
        self._turns: Counter[tuple[str, int]] = Counter()
        self._seen: dict[tuple[str, int], dict[_Wait, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._copies: dict[tuple[str, int], dict[tuple[str, int], list[list[Any]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._callers: dict[_Wait, Stack] = {}  # the calls that lead to each wait
        self._numbers: set[_Wait] = set()  # waits for one number, as a loss
        self.quiet = False
        self.elsewhere: Callable[[], bool] = lambda: False  # whether a loader's worker runs now
        for function in WAITS:
            origins.special[function] = self._wait
        self._events: list[Any] = []

    def follow(self, events: list[Any]) -> None:
        """Take copies from the simulation's list of events."""
        self._events = events

    def _wait(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0] if args else None
        if self.quiet or not isinstance(tensor, torch.Tensor) or tensor.device.type == "cpu":
            return
        if self.elsewhere():
            return
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_THROUGH):
            frame = frame.f_back
        file = frame.f_code.co_filename
        if "/torch/" in file and not self._territory.holds(file):
            return  # torch's own, as the scaler's
        stack = self._territory.stack(frame)
        # A library's own waits, as a trainer's, are not the user's to mend.
        mild = not torch.is_grad_enabled() or not self._territory.holds(file)
        if stack:
            wait = stack[0].file, stack[0].line, WAITS[func], mild
            self._callers.setdefault(wait, callers(stack, _CALLERS))
            if not tensor.dim() and tensor.is_floating_point():
                self._numbers.add(wait)
            for turn in self._now.values():
                turn.waits[wait] += 1

    def _moved(self, origin: Origin, place: Place) -> None:
        if origin.place is None or self.quiet or self.elsewhere():
            return
        for turn in self._now.values():
            if origin.born > turn.calls:
                turn.made.add((place.file, place.line))

    def step(self, optimizer: Any, stack: Stack) -> None:
        """Told before each step: closes a turn where the same call stepped before."""
        if not stack:
            return
        place = stack[0].file, stack[0].line
        before = self._now.get(id(optimizer))
        if before is not None and before.loop is self._loops.innermost:
            self._turns[place] += 1
            for wait, count in before.waits.items():
                self._seen[place][wait].append(count)
            self._made[place].update(before.made)
            for line, made in self._copies_since(before.events).items():
                self._copies[place][line].append(made)
        self._now[id(optimizer)] = _Turn(
            self._loops.innermost, len(self._events), self._origins.calls
        )

    def _copies_since(self, index: int) -> dict[tuple[str, int], list[Any]]:
        found: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for event in self._events[index:]:
            if getattr(event, "direction", "") == "h2d" and event.location is not None:
                found[event.location.file, event.location.line].append(event)
        return found

    def tell(self) -> None:
        """Say what was seen in every turn."""
        told: set[_Wait | tuple[str, int]] = set()
        for place, turns in self._turns.items():
            if turns < _TURNS:
                continue
            for wait, counts in self._seen[place].items():
                if len(counts) >= turns and wait not in told:
                    told.add(wait)
                    self._tell_wait(wait, counts)
            for line, count in self._made[place].items():
                if count >= turns and line not in told:
                    told.add(line)
                    self._collected.add(
                        "HST137",
                        *line,
                        "what is moved here is made on the CPU in the same step.",
                        fix="make it on the device: torch.randn(..., device=device)",
                        severity="suggestion",
                        count=count,
                    )
            for line, copies in self._copies[place].items():
                if len(copies) >= turns and line not in told:
                    told.add(line)
                    self._tell_copies(*line, copies)

    def _tell_wait(self, wait: _Wait, counts: list[int]) -> None:
        file, line, kind, mild = wait
        module = tree(file)
        if not mild and wait not in self._numbers and module is not None:
            mild = needed(module, line)
        times = "time" if max(counts) == 1 else "times"
        self._collected.add(
            "HST120",
            file,
            line,
            f"{kind} makes the step wait for the device, {max(counts)} {times} a step: "
            f"`{source_line(file, line)}`.",
            fix="keep the value on the device (loss.detach()) and read it every N steps",
            severity="suggestion" if mild else "warning",
            count=sum(counts),
            related=tuple(
                (p.file, p.line, "called from here") for p in self._callers.get(wait, ())
            ),
        )

    def _tell_copies(self, file: str, line: int, turns: list[list[Any]]) -> None:
        sources = [{_content(copy) for copy in turn} for turn in turns]
        again = set.intersection(*sources)
        if any(content[-1] > _SMALL for content in again):
            self._collected.add(
                "HST139",
                file,
                line,
                "the same data is copied to the device at each step.",
                fix="copy it once, before the loop",
                severity="suggestion",
                count=len(turns),
            )
            return
        unpinned = [c for turn in turns for c in turn if not c.pinned and c.bytes > _SMALL]
        if unpinned:
            self._tell_unpinned(file, line, unpinned, len(turns))

    def _tell_unpinned(self, file: str, line: int, copies: list[Any], turns: int) -> None:
        """Batches are pinned by their loader: its line is what wants the change, if it is known."""
        loader = self._origins.feeds.get((file, line))
        at = (file, line) if loader is None else loader[:2]
        idle = any(copy.non_blocking for copy in copies)
        if idle and loader is None:
            self._collected.add(
                "HST126",
                *at,
                "non_blocking copies from memory that is not pinned wait all the same.",
                fix="pin_memory=True in the DataLoader, or tensor.pin_memory() before the copy",
                severity="suggestion",
                count=len(copies),
            )
            return
        note = "non_blocking=True has no effect here until then" if idle else "copied here"
        self._collected.add(
            "HST124",
            *at,
            f"{sum(copy.bytes for copy in copies) // turns:,} bytes a step are copied from "
            "memory that is not pinned.",
            fix="pin_memory=True in the DataLoader"
            + ("" if idle else " and non_blocking=True in the copy"),
            severity="suggestion",
            count=len(copies),
            related=() if loader is None else ((file, line, note),),
        )


def _content(copy: Any) -> tuple[int, ...]:
    """What is equal for two copies of the same data; its bytes come last."""
    return copy.storage_id, copy.offset, copy.version, copy.bytes
