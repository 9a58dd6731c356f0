"""From tensors that met on two devices to the fault behind: which kind it is, and which line."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import nn

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.modules import Modules
from hasten.script.rehearsal.naming import Named, name_of
from hasten.script.rehearsal.origins import Origin, Origins, address
from hasten.script.rehearsal.partial import Left, beside, left_at
from hasten.script.rehearsal.places import Place, Stack, Territory, callers, expression
from hasten.script.rehearsal.reasons import (
    Cause,
    first_maker,
    first_stack,
    of_dropped,
    of_making,
    of_own_class,
)
from hasten.script.rehearsal.syntax import assigned, moved_at_once, unpacks


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
            first = first_maker(origin)
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
        if "index" in op and moved_at_once(here.file, here.line, expression(frames[0])):
            return _of_index(origin, here)
        found = of_own_class(named) or self._of_copy(origin, here)
        found = found or self._of_computed(tensor, origin, here)
        found = found or of_dropped(origin, named)
        found = found or self._of_batch(tensor, origin, named, frames, here)
        found = found or self._of_part(tensor, origin, frames)
        return found or of_making(origin, named, here, op)

    def _of_state(self, tensor: torch.Tensor, here: Place) -> Cause | None:
        return None if self.states is None else self.states(tensor, here)

    def _of_module(self, tensor: torch.Tensor, here: Place) -> Cause | None:
        memory = address(tensor)
        found = self._modules.owner(tensor, lambda held: memory and address(held) == memory)
        return None if found is None else self._of_held(tensor, found, here)

    def _of_computed(
        self, tensor: torch.Tensor, origin: Origin | None, here: Place
    ) -> Cause | None:
        """What a module that is still on the CPU has computed."""
        weight = 0 if origin is None else origin.weight
        found = self._modules.owner(tensor, lambda held: weight and address(held) == weight)
        if found is None or found[1] == "plain":
            return None
        return self._of_held(tensor, found, here)

    def _of_held(
        self, tensor: torch.Tensor, found: tuple[nn.Module, str, str], here: Place
    ) -> Cause:
        module, kind, name = found
        kept = type(module).__name__
        stack = self._modules.built(module)
        if kind == "plain":
            return self._of_attribute(tensor, module, name, here)
        holder = self._modules.container(module)
        if holder is not None:
            parent, attribute = holder
            place = _in_class(stack, parent) or (stack[0] if stack else here)
            file, line = assigned(type(parent), attribute) or place[:2]
            return Cause(
                "HST106",
                file,
                line,
                f"`self.{attribute}` of {type(parent).__name__} is a plain "
                f"{type(parent.__dict__[attribute]).__name__}: its modules are not moved with it, "
                "and the optimizer does not see their parameters.",
                f"self.{attribute} = nn.ModuleDict(...) or nn.ModuleList(...)",
                tuple((p.file, p.line, "one of them is made here") for p in stack[:1]),
            )
        whole = self._modules.top(module)
        if _is_loss(whole):
            return self._of_loss(whole, name, here)
        place = self._built_at(whole) or here
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

    def _of_loss(
        self, loss: nn.Module, name: str, here: Place, *made: tuple[str, int, str]
    ) -> Cause:
        place = self._modules.outside_init(self._modules.built(loss)) or here
        wanted = self._built_at(loss) or place
        return Cause(
            "HST108",
            place.file,
            place.line,
            f"the loss {type(loss).__name__} keeps `{name}` on the CPU.",
            f"{type(loss).__name__}(...).to(device), or give it weights that are on the device",
            (*made, (wanted.file, wanted.line, "asked for here")),
        )

    def _built_at(self, module: nn.Module) -> Place | None:
        """Where the module was made, best in the function that moves modules."""
        stack = self._modules.built(module)
        movers = {(p.frame, p.function) for move in self._modules.moves for p in move.stack[:1]}
        outside = self._modules.outside_init(stack)
        start = stack.index(outside) if outside is not None else 0
        for place in stack[start:]:
            held = place.function.endswith(".__init__")  # of an object that keeps it
            if held or (place.frame, place.function) in movers:
                return outside if unpacks(place.file, place.line) else place
        return outside

    def _of_attribute(
        self, tensor: torch.Tensor, module: nn.Module, name: str, here: Place
    ) -> Cause:
        origin = self._origins.behind(tensor)
        places = origin.stack if origin is not None and origin.stack else ()
        place = _in_class(places, module) or (places[0] if places else here)
        if place == here or _is_forward(place):
            return of_making(origin, None, here, "")
        whole = self._modules.top(module)
        made = (place.file, place.line, "the tensor is made here")
        if _is_loss(whole) and not self._modules.was_moved(whole):
            return self._of_loss(whole, name, here, made)
        file, line = assigned(type(module), name) or place[:2]
        return Cause(
            "HST105",
            file,
            line,
            f"`self.{name}` of {type(module).__name__} is a plain tensor attribute, which "
            "`.to(device)` leaves on the CPU.",
            f'self.register_buffer("{name}", ...)',
            (made,),
        )

    def _of_copy(self, origin: Origin | None, here: Place) -> Cause | None:
        """A copy of parameters that was made before the model moved."""
        if origin is None or not origin.weight or not origin.stack:
            return None
        if any(not root.weight for root in origin.roots):
            return None  # computed from data by a module that is on the CPU: no copy
        shared, moved = self._modules.shared(origin.stack)
        place, made = shared or origin.stack[-1], origin.stack[0]
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

    def _of_batch(
        self,
        tensor: torch.Tensor,
        origin: Origin | None,
        named: Named | None,
        frames: list[FrameType],
        here: Place,
    ) -> Cause | None:
        if origin is None or origin.batch is None:
            return None
        if origin.how != "DataLoader" and origin.place is not None and origin.place[:2] != here[:2]:
            return None  # made from the batch elsewhere: that is the line to mend
        name = f"`{named.text}`" if named else "a tensor"
        moved = self._origins.batch_moves.get(origin.batch)
        related = [(p.file, p.line, "comes from here") for p in first_stack(origin)[:1]]
        file, line = here[:2]
        if moved:
            path = named.text if named else ""
            file, line = left_at(Left(path, moved), tensor, frames)
            related += _moves(moved)
        return Cause(
            "HST109",
            file,
            line,
            f"{name} of the loader's batch stays on the CPU"
            + (" while other parts of it are moved." if moved else "."),
            f"{named.text if named else 'batch'}.to(device)",
            tuple(related),
        )

    def _of_part(
        self, tensor: torch.Tensor, origin: Origin | None, frames: list[FrameType]
    ) -> Cause | None:
        """A part of a batch that no loader made, while others beside it were moved."""
        left = beside(tensor, origin, frames, self._origins)
        if left is None:
            return None
        file, line = left_at(left, tensor, frames)
        related = _moves(left.moved)
        first = first_maker(origin)
        if first is not None and first.place is not None:
            related.append((first.place.file, first.place.line, "made here"))
        return Cause(
            "HST109",
            file,
            line,
            f"`{left.path}` stays on the CPU while other parts of it are moved.",
            f"{left.path}.to(device)",
            tuple(related),
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


def _moves(stack: Stack) -> list[tuple[str, int, str]]:
    """Where other parts of a batch are moved, and the call that leads there."""
    here = [(p.file, p.line, "other parts are moved here") for p in stack[:1]]
    return here + [(p.file, p.line, "called from here") for p in callers(stack, 1)]


def _of_index(origin: Origin | None, here: Place) -> Cause:
    """A table that is meant to be on the CPU: what it gives is moved at once."""
    first = first_maker(origin)
    made = [(p.file, p.line, "the table is made here") for p in (first.stack if first else ())[:1]]
    return Cause(
        "HST110",
        here.file,
        here.line,
        "a table on the CPU is indexed from the device, and what it gives is moved only then.",
        "index on the CPU: table[index.cpu()].to(device), or keep the table on the device",
        tuple(made),
    )


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
