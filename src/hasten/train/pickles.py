"""Looking at a pickle before anything of it is loaded: what it would call, how large it would grow.

torch's own safe loading refuses most of what does harm, but only on the way: it allocates what a
file claims, follows one that refers to itself for ever, and fails in many words of its own. Here a
pickle is read as the list of instructions that it is; nothing of it is carried out.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import torch

LIMIT_INSTRUCTIONS = 4_000_000
"""Of one pickle: more than a hundred thousand tensors need."""
LIMIT_VALUES = 20_000_000
"""That a pickle may unfold to, where it refers to a part several times."""
_LIMIT_KEY = 1_000  # values in a key that is a tuple: each use of it goes through them
_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save before it wrote archives
_PICKLES_BEFORE_ARCHIVES = 5  # magic, version, machine, content, names of the storages

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_CALLED = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "builtins.complex",
        "_codecs.encode",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.nn.parameter.Parameter",
        "torch._tensor._rebuild_from_type_v2",
        *(f"torch._utils.{name}" for name in _REBUILD),
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_meta_tensor_no_storage",
    }
)
_SCALARS = frozenset({"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"}) | {
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINSTRING",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
}
_PUTS, _GETS = frozenset({"BINPUT", "LONG_BINPUT"}), frozenset({"BINGET", "LONG_BINGET"})
_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_PROTOCOL = 3
_MARK = object()


class Refused(Exception):  # noqa: N818  (it is no error of ours; the caller words one)
    """Why a pickle is not to be loaded.

    Attributes:
        wants: what it asks to run, if that is why.
    """

    def __init__(self, reason: str, wants: str | None = None) -> None:
        super().__init__(reason)
        self.wants = wants


class _Global(str):
    """A name that the pickle would look up."""

    __slots__ = ()


class _Node:
    """A value made of others."""

    __slots__ = ("items", "keys", "kind", "unfolded")

    def __init__(self, kind: str, items: list[Any]) -> None:
        self.kind, self.items = kind, items
        self.keys: list[Any] = []
        self.unfolded: float | None = None  # NaN while it is being counted


def check_old_file(file: BinaryIO, size: int) -> None:
    """Check all pickles of a file that ``torch.save`` wrote before it wrote archives.

    Args:
        file: open at its start; left anywhere.
        size: of the file in bytes.

    Raises:
        Refused: it is none, or not to be loaded.
    """
    if check(file, size, size) != _MAGIC:
        raise Refused("it does not begin as a file of torch.save does")
    for _ in range(_PICKLES_BEFORE_ARCHIVES - 1):
        check(file, size, size)


def check(file: BinaryIO, end: int, size: int) -> Any:
    """Check one pickle.

    Args:
        file: at the pickle's start; left at its end.
        end: where the file ends that it is read from.
        size: of the whole file in bytes: nothing in it can be larger.

    Returns:
        Its value, if that is a number, a text or nothing.

    Raises:
        Refused: it calls what tensors do not need, is cut, or would grow beyond its file.
    """
    machine = _Machine(size)
    bounded = cast(Any, _Bounded(file, end))
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(bounded)):
            if count > LIMIT_INSTRUCTIONS:
                raise Refused(f"it has more than {LIMIT_INSTRUCTIONS:,} instructions")
            machine.do(operation.name, argument)
    except Refused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        # How pickletools tells of what is no pickle, and the stack of one that takes too much.
        first = str(error).strip().partition("\n")[0] if isinstance(error, ValueError) else ""
        why = first or "its instructions do not fit each other"
        raise Refused(f"it is no pickle, or is cut ({why})") from error
    return machine.result()


class _Bounded:
    """A file that is asked for no more than it has: for what a pickle claims there may be no
    memory."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end = file, end
        self.tell, self.readline = file.tell, file.readline

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, max(self._end - self.tell(), 0)))


class _Machine:
    """Keeps a stack as a loader would, of what values are made of."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers: list[_Node] = []
        self.texts: list[str] = []  # the last two, which STACK_GLOBAL names
        self.protocol = 0

    def do(self, name: str, argument: Any) -> None:
        if name in _SCALARS:
            if isinstance(argument, str):
                self.texts = [*self.texts[-1:], argument]
            self.stack.append(argument)
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name == "PROTO":
            self.protocol = argument
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name not in ("FRAME", "STOP"):
            self._do_rarer(name, argument)

    def result(self) -> Any:
        if self.protocol > _PROTOCOL:
            raise Refused(
                f"it is written in protocol {self.protocol} of pickle, and safe loading reads"
                f" {_PROTOCOL}, which torch.save writes by itself"
            )
        for node in self.containers:
            self._count(node)
            if any(self._unfolded(key) > _LIMIT_KEY for key in node.keys):
                raise Refused("it has a key that is a large nest of tuples")
        last = self.stack[-1] if self.stack else None
        return None if isinstance(last, _Node) else last

    def _do_rarer(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "GLOBAL":
                stack.append(_allowed(argument))
            case "STACK_GLOBAL":
                self._take(2)
                stack.append(_allowed(" ".join(self.texts)))
            case "INST":
                raise Refused("it looks up what safe loading does not", _dotted(argument))
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                self._push(name[6:].lower(), [])
            case "TUPLE":
                self._push("tuple", self._to_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._push("tuple", self._take(int(name[-1])))
            case "APPEND":
                (item,) = self._take(1)
                _of_kind(stack[-1], "list").items.append(item)
            case "APPENDS":
                items = self._to_mark()
                _of_kind(stack[-1], "list").items.extend(items)
            case "SETITEM":
                self._set_items(self._take(2))
            case "SETITEMS":
                self._set_items(self._to_mark())
            case "BINPERSID":
                (name_of_storage,) = self._take(1)
                self._push("storage", [name_of_storage])
                self._check_storage(name_of_storage)
            case "REDUCE" | "NEWOBJ":
                function, arguments = self._take(2)
                self._check_call(function, arguments)
                made = self._push("call", [function, arguments])
                if function == "builtins.set":
                    made.keys = [item for part in arguments.items for item in _items(part)]
            case "BUILD":
                (state,) = self._take(1)
                _node(stack[-1]).items.append(state)
            case _:
                raise Refused(f"it has the instruction {name}, which torch.save does not write")

    def _push(self, kind: str, items: list[Any]) -> _Node:
        node = _Node(kind, items)
        self.stack.append(node)
        self.containers.append(node)
        return node

    def _take(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        if len(taken) < count or any(item is _MARK for item in taken):
            raise Refused("it takes from an empty stack")
        del self.stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items

    def _set_items(self, pairs: list[Any]) -> None:
        target = _node(self.stack[-1])
        if target.kind not in ("dict", "call"):
            raise Refused("it sets items of what has none")
        target.keys.extend(pairs[::2])
        target.items.extend(pairs)

    def _check_call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, _Global) or _node(arguments).kind != "tuple":
            raise Refused("it calls what is no name")
        if function.rpartition(".")[2] not in _REBUILD:
            return
        storage, offset, sizes, strides = arguments.items[:4]
        numbers = [offset, *_items(sizes), *_items(strides)]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise Refused("it has a tensor whose sizes are no counts")
        held = _items(_items(storage)[0])[4]
        shape = list(zip(_items(sizes), _items(strides), strict=True))
        needs = offset + sum((size - 1) * stride for size, stride in shape) + 1
        if math.prod(size for size, _ in shape) and needs > held:
            raise Refused(f"it has a tensor of {needs:,} values in {held:,}")

    def _check_storage(self, name: Any) -> None:
        parts = _items(name)
        count = parts[4]
        if parts[0] not in ("storage", b"storage") or type(count) is not int or count < 0:
            raise Refused("it refers to what is no storage of a tensor")
        if count > self.size:
            raise Refused(f"it claims {count:,} values in a file of {self.size:,} bytes")

    def _unfolded(self, value: Any) -> float:
        return self._count(value) if isinstance(value, _Node) else 1

    def _count(self, top: _Node) -> float:
        """How many values it comes to when each part is gone through wherever it is referred to."""
        waiting = [top]
        while waiting:
            node = waiting[-1]
            if node.unfolded is not None and not math.isnan(node.unfolded):
                waiting.pop()
                continue
            below = [item for item in node.items if isinstance(item, _Node)]
            if node.unfolded is None:
                node.unfolded = math.nan
                todo = [item for item in below if item.unfolded is None]
                if any(item.unfolded is not None and math.isnan(item.unfolded) for item in below):
                    raise Refused("it refers to itself")
                waiting.extend(todo)
                continue
            node.unfolded = 1 + len(node.items) + sum(item.unfolded or 0 for item in below)
            if node.unfolded > LIMIT_VALUES:
                raise Refused(f"it unfolds to more than {LIMIT_VALUES:,} values")
            waiting.pop()
        return top.unfolded or 1


def _allowed(words: str) -> _Global:
    name = _dotted(words)
    module, _, last = name.rpartition(".")
    storage = module in ("torch", "torch.storage", "torch.cuda") and last.endswith("Storage")
    kind = module == "torch" and isinstance(getattr(torch, last, None), _KINDS)
    if name not in _CALLED and not storage and not kind:
        raise Refused("it looks up what safe loading does not", name)
    return _Global(name)


def _dotted(words: str) -> str:
    module, _, name = str(words).partition(" ")
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    return f"{module}.{name}"


def _node(value: Any) -> _Node:
    if not isinstance(value, _Node):
        raise Refused("it takes a plain value for a nest of them")
    return value


def _of_kind(value: Any, kind: str) -> _Node:
    node = _node(value)
    if node.kind != kind:
        raise Refused(f"it takes a {node.kind} for a {kind}")
    return node


def _items(value: Any) -> Sequence[Any]:
    node = _node(value)
    if node.kind == "call" and node.items[0] == "torch.Size":
        return _items(_items(node.items[1])[0])
    return node.items
