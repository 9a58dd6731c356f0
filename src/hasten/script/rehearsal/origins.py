"""Where host tensors were made: a function mode that remembers it for each that is alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from hasten.script.rehearsal.places import Place, Stack, Territory

_ROOTS = 4  # first makers that a derived tensor remembers
_BATCHES = 16  # batches whose moves are remembered
_MOVES = (torch.Tensor.to, torch.Tensor.cuda)
_FACTORIES = frozenset(
    [
        "tensor",
        "as_tensor",
        "zeros",
        "ones",
        "full",
        "arange",
        "linspace",
        "eye",
        "empty",
        "rand",
        "randn",
        "randint",
        "randperm",
    ]
)


class Origin:
    """How a host tensor came to be.

    Attributes:
        stack: the user's places, innermost first.
        how: the function (``torch.arange``); ``DataLoader`` for what a loader gave.
        roots: the origins without inputs that it was computed from; itself where it is one.
        weight: the address of a module's parameter that went into it, 0 for none.
        batch: number of the loader's batch that it belongs to, or None.
        born: number of the call that made it.
        moved: where it was copied to the device, and whether the copy was ever used.
    """

    __slots__ = ("__weakref__", "batch", "born", "how", "moved", "roots", "stack", "weight")

    def __init__(self, stack: Stack, how: str) -> None:
        self.stack, self.how = stack, how
        self.roots: tuple[Origin, ...] = (self,)
        self.weight = 0
        self.batch: int | None = None
        self.born = 0
        self.moved: list[Moved] = []

    @property
    def place(self) -> Place | None:
        """The innermost place, or None where no user code ran."""
        return self.stack[0] if self.stack else None


class Moved:
    """One copy of a host tensor to the device: where, whether it was used, whether it is gone."""

    __slots__ = ("gone", "place", "used")

    def __init__(self, place: Place) -> None:
        self.place, self.used, self.gone = place, False, False


Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]


class Origins(TorchFunctionMode):
    """Sees each call of a torch function that Python makes, before the simulation does."""

    def __init__(self, territory: Territory) -> None:
        super().__init__()
        self._territory = territory
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        self._by_memory: dict[int, tuple[StorageWeakRef, Origin]] = {}
        self._fresh: dict[int, Moved] = {}
        self._placed: dict[int, tuple[weakref.ref[torch.Tensor], Place]] = {}
        # Watchers that look at single functions: given func, args, kwargs; a tuple of one value
        # that they return is the call's result.
        self.special: dict[Any, Special] = {}
        # Told of each result that lies on the device, while this is not None.
        self.on_device_result: Callable[[torch.Tensor, tuple[Any, ...]], None] | None = None
        # Told of each host tensor without inputs that is copied to the device, and where.
        self.on_move: Callable[[Origin, Place], None] | None = None
        self.calls = 0
        self.arrived: dict[int, Stack] = {}  # device memory to where it came there
        self.batch_moves: dict[int, Stack] = {}  # where a batch's first part was moved
        self._makers: dict[int, Place] = {}  # by batch: where its loader was made
        self.feeds: dict[tuple[str, int], Place] = {}  # by line that moves batches: their loader

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = self.special.get(func)
        if special is not None:
            answer = special(func, args, kwargs)
            if answer is not None:
                return answer[0]
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return out
        self.calls += 1
        if self._fresh:
            self._mark_used(args)
        if isinstance(out, torch.Tensor):
            self._note(func, name, out, args)
        elif type(out) in (tuple, list):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._note(func, name, item, args)
        return out

    def _mark_used(self, args: Any) -> None:
        fresh = self._fresh
        for arg in args:
            if type(arg) in (tuple, list):
                self._mark_used(arg)
            elif id(arg) in fresh:
                fresh.pop(id(arg)).used = True

    def _note(self, func: Any, name: str, out: torch.Tensor, args: tuple[Any, ...]) -> None:
        if out.device.type != "cpu":
            if self.on_device_result is not None:
                self.on_device_result(out, args)
            if func in _MOVES and args and args[0] is not out:
                self._note_move(args[0], out)
            elif name in _FACTORIES:
                stack = self._territory.stack(sys._getframe(2))
                if stack:
                    self.arrived[address(out)] = stack
                    self._place(out, stack[0])
            return
        if self.of(out) is not None or isinstance(out, torch.nn.Parameter):
            return  # no weak reference to a parameter: it could not be moved in place
        origin = Origin(self._territory.stack(sys._getframe(2)), _spoken(func, name))
        origin.born = self.calls
        inputs = [known for known in map(self._input, tensors_in(args)) if known is not None]
        if inputs:
            roots = {id(r): r for known in inputs for r in known.roots}
            origin.roots = tuple(roots.values())[-_ROOTS:]
            batches = [known.batch for known in inputs if known.batch is not None]
            origin.batch = batches[0] if batches else None
        weights = [address(arg) for arg in args if isinstance(arg, torch.nn.Parameter)]
        weights += [known.weight for known in inputs if known.weight]
        origin.weight = weights[0] if weights else 0
        self._remember(out, origin)

    def _input(self, tensor: torch.Tensor) -> Origin | None:
        return self.of(tensor)

    def _remember(self, tensor: torch.Tensor, origin: Origin) -> None:
        key = id(tensor)
        table = self._of
        table[key] = (weakref.ref(tensor, lambda _, key=key: table.pop(key, None)), origin)  # type: ignore[misc]
        memory = address(tensor)
        if memory and (len(origin.roots) == 1 and origin.roots[0] is origin):
            with torch._C.DisableTorchFunction():
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._by_memory[memory] = storage, origin

    def _note_move(self, source: Any, out: torch.Tensor) -> None:
        origin = self.of(source) if isinstance(source, torch.Tensor) else None
        stack = self._territory.stack(sys._getframe(3))
        if origin is None or not stack:
            return
        moved = Moved(stack[0])
        if self.on_move is not None and origin.roots[0] is origin and origin.batch is None:
            self.on_move(origin, stack[0])
        if origin.batch is not None:
            self.batch_moves.setdefault(origin.batch, stack)
            if origin.how == "DataLoader" and origin.batch in self._makers:
                self.feeds[stack[0].file, stack[0].line] = self._makers[origin.batch]
            while len(self.batch_moves) > _BATCHES:
                del self.batch_moves[next(iter(self.batch_moves))]
        origin.moved.append(moved)
        del origin.moved[:-4]
        self._fresh[id(out)] = moved
        self.arrived[address(out)] = stack
        self._place(out, stack[0], moved)

    def _place(self, out: torch.Tensor, place: Place, moved: Moved | None = None) -> None:
        """Remember where a tensor of the device came to it."""
        key, fresh, placed = id(out), self._fresh, self._placed

        def forget(_: Any) -> None:
            if moved is not None:
                moved.gone = True
            fresh.pop(key, None)
            placed.pop(key, None)

        placed[key] = weakref.ref(out, forget), place

    def placed(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor was moved to the device or made on it; None where it was computed."""
        known = self._placed.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """What is known of a tensor itself."""
        known = self._of.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def behind(self, tensor: torch.Tensor) -> Origin | None:
        """What is known of a tensor, or of the memory that it is a view of."""
        known = self.of(tensor)
        if known is None:
            storage, found = self._by_memory.get(address(tensor), (None, None))
            # Memory that was given back is another tensor's at the same address.
            known = found if storage is not None and not storage.expired() else None  # type: ignore[no-untyped-call]
        return known

    def loaded(self, batch: Any, number: int, stack: Stack, maker: Stack) -> None:
        """Mark the host tensors of a loader's batch as such.

        Args:
            batch: what the loader gave, in any nesting.
            number: the batch's number.
            stack: where it was asked for.
            maker: where the loader was made, empty where that is not known.
        """
        if maker:
            self._makers[number] = maker[0]
            while len(self._makers) > _BATCHES:
                del self._makers[next(iter(self._makers))]
        for tensor in tensors_in((batch,)):
            origin = Origin(stack, "DataLoader")
            origin.batch = number
            self._remember(tensor, origin)


def address(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in; 0 where it has none."""
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0


def tensors_in(values: Any, depth: int = 4) -> list[torch.Tensor]:
    """The tensors in values of any nesting, also in objects of the user's."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and isinstance(value, (tuple, list)):
            found.extend(tensors_in(value, depth - 1))
        elif depth and isinstance(value, dict):
            found.extend(tensors_in(value.values(), depth - 1))
        elif (
            depth and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module))
        ):
            found.extend(tensors_in(vars(value).values(), depth - 2 if depth > 1 else 0))
    return found


def _spoken(func: Any, name: str) -> str:
    owner = getattr(func, "__objclass__", None) or getattr(func, "__module__", None)
    if owner in (torch.Tensor, torch._C.TensorBase) or str(owner) == "torch._tensor":
        return f"Tensor.{name}"
    return f"torch.{name}" if name else "torch"
