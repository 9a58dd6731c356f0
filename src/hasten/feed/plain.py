"""Which objects hold no code of a person's: constants, plain values and records of them."""

from __future__ import annotations

import dataclasses
import enum
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_MOST_ITEMS = 5_000_000  # of lists that are looked through: a tenth of a second
_MOST_NESTED = 100_000  # of those with lists or dicts in them
_PLAIN = frozenset([int, float, complex, bool, str, bytes, type(None), range])
_KINDS = (torch.dtype, torch.device, torch.memory_format, torch.Size, np.dtype)
_GENERATED = frozenset(["dataclasses", "collections", "typing", "reprlib"])


def is_constant(value: Any) -> bool:
    """Whether it cannot be written to: numbers, text, paths, types of numbers, layouts of tensors.

    Of enums, PIL's.
    """
    if isinstance(value, type):
        return value.__module__ in ("builtins", "numpy")
    if isinstance(value, enum.Enum):
        return type(value).__module__.startswith("PIL.")
    return _is_single(value) or isinstance(value, _KINDS)


def is_plain(value: Any, depth: int = 3) -> bool:
    """Numbers, text, tensors and arrays, and lists, tuples and dicts of them.

    False also of lists that are too long to look through.
    """
    kind = type(value)
    if _is_single(value):
        return True
    if kind in (np.ndarray, np.memmap):
        return not value.dtype.hasobject
    if kind is torch.Tensor:
        return True
    if not depth or kind not in (list, tuple, dict):
        return False
    if len(value) > _MOST_ITEMS:
        return False
    if kind is dict:
        return _all_plain(list(value), depth) and _all_plain(list(value.values()), depth)
    return _all_plain(value, depth)


def _is_single(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, PurePath | np.generic):
        return kind.__module__.startswith(("pathlib", "numpy")) and kind is not np.object_
    return kind in _PLAIN


def _all_plain(values: list[Any] | tuple[Any, ...], depth: int) -> bool:
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    pairs = kinds <= {list, tuple} and depth > 1 and sum(map(len, values)) <= _MOST_ITEMS
    if pairs and set(map(type, chain.from_iterable(values))) <= _PLAIN:
        return True
    return len(values) <= _MOST_NESTED and all(is_plain(each, depth - 1) for each in values)


def is_record(kind: type) -> bool:
    """A dataclass or named tuple without code of its own in what Python calls by itself."""
    record = "__dataclass_fields__" in vars(kind) and not hasattr(kind, "__post_init__")
    if record:
        made = [f.default_factory for f in dataclasses.fields(kind)]
        record = all(f is dataclasses.MISSING or f in (list, dict, set) for f in made)
    named = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return type(kind) is type and (record or named) and is_bare(kind)


def is_bare(kind: type) -> bool:
    """Whether no code of a person's runs when it is made, compared or computed with."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            code = getattr(value, "__code__", None)
            if not name.startswith("__") or code is None or code.co_filename == "<string>":
                continue
            if value.__globals__.get("__name__") not in _GENERATED:
                return False
    return True
