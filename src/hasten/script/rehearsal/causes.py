"""From tensors that met on two devices to the fault behind: which kind it is, and which line."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.modules import Modules
from hasten.script.rehearsal.naming import Named, name_of, parts
from hasten.script.rehearsal.origins import Origin, Origins, address
from hasten.script.rehearsal.places import Place, Stack, Territory, expression

_MOVERS = ("to", "cuda", "to_device", "move_to", "move", "send")


@dataclass(frozen=True)
class Cause:
    """Where the fix goes, of what kind the fault is, and what to write."""

    code: str
    file: str
    line: int
    why: str
    fix: str
    related: tuple[tuple[str, int, str], ...] = ()


class Causes:
    """Turns each mismatch into a finding."""

    def __init__(
        self, territory: Territory, origins: Origins, modules: Modules, collected: Collected
    ) -> None:
        self._territory, self._origins = territory, origins
        self._modules, self._collected = modules, collected
        self.backward: tuple[list[FrameType], Stack] | None = None  # the running backward's
        self.states: Any = None  # set by the watcher of optimizers

    def install(self) -> None:
        """Look at the recurrent functions, which check devices before the simulation does."""
        for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
            self._origins.special[function] = self._recurrent

    def _recurrent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from hasten.simulate import MismatchInfo, Operand

        sizes = args[1] if len(args) > 1 else None
        packed = isinstance(sizes, torch.Tensor) and not sizes.is_floating_point()
        if packed:  # the sizes of a packed batch belong on the CPU
            args = (args[0], *args[2:])
        operands = [
            Operand(role=role, tensor=tensor, device=str(tensor.device))
            for role, tensor in _flat(args)
        ]
        devices = {operand.device for operand in operands}
        if len(devices) < 2 or "cpu" not in devices:
            return None
        target = next(device for device in sorted(devices) if device != "cpu")
        told = [operands[0], *(o for o in operands[1:] if o.device != operands[0].device)][:3]
        info = MismatchInfo(op=func.__name__, operands=tuple(told), message="", location=None)
        if self.mismatch(info) != "repair":
            return None
        moved = _moved(args, target)
        if packed:
            moved = (moved[0], sizes, *moved[1:])
        return (func(*moved, **kwargs),)

    def mismatch(self, info: Any) -> str:
        """Told by the simulation of tensors that do not meet; says to go on."""
        frames = self._territory.frames()
        if not frames and self.backward is not None:
            frames = self.backward[0]
        if not frames:
            return "raise"
        at = frames[0]
        here = Place(at.f_code.co_filename, at.f_lineno, at.f_code.co_qualname, id(at))
        on_host = [o for o in info.operands if o.device == "cpu" and o.tensor.dim() > 0] or [
            o for o in info.operands if o.device == "cpu"
        ]
        text = self._operands(info, frames)
        head = f"`{expression(at)}` mixes devices: {text}"
        if not on_host:
            self._collected.add(
                "HST115",
                here.file,
                here.line,
                head,
                fix="move all operands to one device before they meet",
            )
            return "repair"
        for operand in on_host:
            named = name_of(operand.tensor, frames)
            cause = self._cause(operand.tensor, named, frames, here, info.op)
            message = head if not cause.why else f"{cause.why}\n{head}"
            surfaces = (here.file, here.line, f"fails here: {expression(at)}")
            self._collected.add(
                cause.code,
                cause.file,
                cause.line,
                message,
                fix=cause.fix,
                related=(surfaces, *cause.related),
            )
        return "repair"

    def _operands(self, info: Any, frames: list[FrameType]) -> str:
        told = []
        for operand in info.operands:
            named = name_of(operand.tensor, frames)
            name = f"`{named.text}`" if named else f"an intermediate result ({operand.role})"
            text = f"{name} is on {operand.device}, shape {list(operand.tensor.shape)}"
            origin = self._origins.behind(operand.tensor) if operand.device == "cpu" else None
            first = _first(origin)
            if first is not None and first.place is not None:
                where = f"{self._collected.shown(first.place.file)}:{first.place.line}"
                text += f", made on the CPU at {where} by {first.how}"
            told.append(text)
        return "; ".join(told)

    def _cause(
        self,
        tensor: torch.Tensor,
        named: Named | None,
        frames: list[FrameType],
        here: Place,
        op: str,
    ) -> Cause:
        origin = self._origins.behind(tensor)
        for judge in (self._of_state, self._of_module):
            found = judge(tensor, here)
            if found is not None:
                return found
        found = _of_own_class(named) or self._of_copy(origin, here)
        found = found or _of_dropped(origin, named) or self._of_batch(origin, named, here)
        return found or _of_making(origin, named, here, op)

    def _of_state(self, tensor: torch.Tensor, here: Place) -> Cause | None:
        return None if self.states is None else self.states(tensor, here)

    def _of_module(self, tensor: torch.Tensor, here: Place) -> Cause | None:
        memory = address(tensor)
        found = self._modules.owner(tensor, lambda held: memory and address(held) == memory)
        if found is None:
            return None
        module, kind, name = found
        kept = type(module).__name__
        stack = self._modules.built(module)
        if kind == "plain":
            return self._of_attribute(tensor, module, name, here)
        holder = self._modules.container(module)
        if holder is not None:
            parent, attribute = holder
            place = _in_class(stack, parent) or (stack[0] if stack else here)
            return Cause(
                "HST106",
                place.file,
                place.line,
                f"`self.{attribute}` of {type(parent).__name__} is a plain "
                f"{type(parent.__dict__[attribute]).__name__}: its modules are not moved with it, "
                "and the optimizer does not see their parameters.",
                f"self.{attribute} = nn.ModuleDict(...) or nn.ModuleList(...)",
            )
        whole = self._modules.top(module)
        place = self._built_at(whole) or here
        if _is_loss(whole):
            return Cause(
                "HST108",
                place.file,
                place.line,
                f"the loss {type(whole).__name__} keeps `{name}` on the CPU.",
                f"{type(whole).__name__}(...).to(device)",
            )
        left = sorted(
            prefix or type(whole).__name__
            for prefix, part in whole.named_modules()
            if any(p.device.type == "cpu" for p in part._parameters.values() if p is not None)
        )
        some = len(left) and any(p.device.type != "cpu" for p in whole.parameters())
        if some:
            names = ", ".join(left[:6]) + (" ..." if len(left) > 6 else "")
            return Cause(
                "HST143",
                place.file,
                place.line,
                f"submodules of {type(whole).__name__} are still on the CPU: {names}.",
                "move the whole model after all its parts are there: model.to(device)",
            )
        return Cause(
            "HST111",
            place.file,
            place.line,
            f"the module {type(whole).__name__} made here is used on the device but was never "
            f"moved there ({kept}.{name} is on the CPU).",
            "move it with .to(device), or make it after the model was moved",
        )

    def _built_at(self, module: nn.Module) -> Place | None:
        """Where the module was made, best in the function that moves modules."""
        stack = self._modules.built(module)
        movers = {place.frame for move in self._modules.moves for place in move.stack[:1]}
        outside = self._modules.outside_init(stack)
        start = stack.index(outside) if outside is not None else 0
        return next((place for place in stack[start:] if place.frame in movers), outside)

    def _of_attribute(
        self, tensor: torch.Tensor, module: nn.Module, name: str, here: Place
    ) -> Cause:
        origin = self._origins.behind(tensor)
        first = _first(origin)
        places = first.stack if first is not None else ()
        place = _in_class(places, module) or (places[0] if places else here)
        if place == here or _is_forward(place):
            return _of_making(origin, None, here, "")
        return Cause(
            "HST105",
            place.file,
            place.line,
            f"`self.{name}` of {type(module).__name__} is a plain tensor attribute, which "
            "`.to(device)` leaves on the CPU.",
            f'self.register_buffer("{name}", ...)',
        )

    def _of_copy(self, origin: Origin | None, here: Place) -> Cause | None:
        """A copy of parameters that was made before the model moved."""
        if origin is None or not origin.parameter or not origin.stack:
            return None
        movers = [p for move in self._modules.moves if move.moved for p in move.stack]
        frames = {place.frame: place for place in movers}
        place = next((p for p in origin.stack if p.frame in frames), origin.stack[-1])
        made = origin.stack[0]
        moved = frames.get(place.frame)
        related = [(made.file, made.line, "copied here")]
        if moved is not None:
            related.append((moved.file, moved.line, "the model is moved here"))
        return Cause(
            "HST107",
            place.file,
            place.line,
            "parameters were copied while the model was still on the CPU.",
            "move the model to the device first",
            tuple(related),
        )

    def _of_batch(self, origin: Origin | None, named: Named | None, here: Place) -> Cause | None:
        if origin is None or origin.batch is None:
            return None
        if origin.how != "DataLoader" and origin.place is not None and origin.place[:2] != here[:2]:
            return None  # made from the batch elsewhere: that is the line to mend
        name = f"`{named.text}`" if named else "a tensor"
        moved = self._origins.batch_moves.get(origin.batch)
        loads = tuple((p.file, p.line, "comes from here") for p in _first_stack(origin)[:1])
        place = moved or here
        return Cause(
            "HST109",
            place.file,
            place.line,
            f"{name} of the loader's batch stays on the CPU"
            + (" while other parts of it are moved." if moved else "."),
            f"{named.text if named else 'batch'}.to(device)",
            loads,
        )


_RECURRENT_ROLES = ("input", "hidden state", "weight")


def _flat(args: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for role, arg in zip(_RECURRENT_ROLES, args, strict=False):
        for item in arg if isinstance(arg, (tuple, list)) else (arg,):
            if isinstance(item, torch.Tensor):
                found.append((role, item))
    return found


def _moved(value: Any, target: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(target)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, target) for item in value)
    return value


def _first(origin: Origin | None) -> Origin | None:
    """The maker to name: the newest root that user code made."""
    if origin is None:
        return None
    mine = [root for root in origin.roots if root.stack]
    return mine[-1] if mine else origin


def _first_stack(origin: Origin) -> Stack:
    first = _first(origin)
    return first.stack if first is not None else ()


def _is_forward(place: Place) -> bool:
    return place.function.endswith(".forward")


def _is_loss(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.modules.loss")
    return own or (
        type(module).__name__.endswith(("Loss", "Criterion")) and not list(module.parameters())
    )


def _in_class(stack: Stack, module: nn.Module) -> Place | None:
    names = {cls.__qualname__ for cls in type(module).__mro__}
    for place in stack:
        owner = place.function.split(".<locals>.<")[0].rpartition(".")[0]
        if owner in names:
            return place
    return None


def _of_own_class(named: Named | None) -> Cause | None:
    """A field that the user's own `to` forgets: evidence is another field that is moved."""
    owner = None if named is None else named.owner
    if owner is None or isinstance(owner, (nn.Module, dict, list, tuple)):
        return None
    for name in _MOVERS:
        method = getattr(type(owner), name, None)
        if not inspect.isfunction(method):
            continue
        if any(held.device.type != "cpu" for _, held, whose in parts(owner) if whose is owner):
            code = method.__code__
            field = named.text.rpartition(".")[2] if named else ""
            return Cause(
                "HST119",
                code.co_filename,
                code.co_firstlineno,
                f"{type(owner).__name__}.{name} moves other fields but leaves `{field}` on the "
                "CPU.",
                f"self.{field} = self.{field}.to(device)",
            )
    return None


def _of_dropped(origin: Origin | None, named: Named | None) -> Cause | None:
    moves = [] if origin is None else [moved for moved in origin.moved if not moved.used]
    if not moves:
        return None
    place = moves[-1].place
    name = f"`{named.text}`" if named else "the tensor"
    return Cause(
        "HST103",
        place.file,
        place.line,
        f"the moved copy is thrown away here, and {name} stays on the CPU: `.to` gives a new "
        "tensor.",
        "keep the result: x = x.to(device); batch = [x.to(device) for x in batch]",
    )


def _of_making(origin: Origin | None, named: Named | None, here: Place, op: str) -> Cause:
    first = origin
    if origin is None or origin.place is None or origin.place[:2] == here[:2]:
        first = _first(origin)  # made in the failing line itself: of what came from elsewhere
    place = first.place if first is not None and first.place is not None else here
    root = _first(origin)
    related: tuple[tuple[str, int, str], ...] = ()
    if root is not None and root is not first and root.place is not None:
        related = ((root.place.file, root.place.line, "from what is made here"),)
    name = f"`{named.text}`" if named else "the tensor"
    index = "index" in op
    code = "HST110" if index else "HST104"
    how = first.how if first is not None else "a call"
    return Cause(
        code,
        place.file,
        place.line,
        f"{name} is made on the CPU by {how}"
        + (" and indexed from the device." if index else " and meets tensors of the device."),
        "make it with device=..., as that of the tensor it meets, or move it with .to(device)",
        related,
    )
