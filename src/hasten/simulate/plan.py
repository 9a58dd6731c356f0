"""What the kernel needs to know of one operator, read from its schema once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hasten.simulate import placement

# The host waits for these on CUDA: their result's value or shape depends on the data.
_WAITS = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "mask",
    "_unique2": "unique",
    "_unique": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "repeat_interleave": "repeat_interleave",
    "bincount": "bincount",
    "_linalg_check_errors": "linalg",
    "_coalesce": "unique",
    "_to_sparse": "nonzero",
    "_to_sparse_csr": "nonzero",
    "_to_sparse_csc": "nonzero",
    "_to_sparse_bsr": "nonzero",
    "_to_sparse_bsc": "nonzero",
}
_HEAVY = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "convolution",
        "convolution_backward",
        "_convolution",
        "linear",
        "_scaled_dot_product_flash_attention_for_cpu",
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """An operator's kind: what it writes, what it views, what it waits for, what may mix."""

    op: Any
    name: str
    overload: str
    base: str
    names: tuple[str, ...]
    """Argument names in order."""
    returns: tuple[tuple[str, str], ...]
    """One pair a result: ("new", ""), ("same", argument name) or ("view", argument name)."""
    outs: tuple[str, ...]
    """Names of ``out=`` arguments."""
    writes: frozenset[str]
    waits: str | None
    seeded: bool
    generator: bool
    has_device: bool
    heavy: bool
    scalars: bool
    device_only: frozenset[str]
    host: frozenset[str]
    host_scalars: frozenset[str]
    indexing: bool
    host_all: bool
    """Whether any of its tensors may be anywhere: copies."""
    structured: bool
    """Whether PyTorch generates it from a structured kernel."""
    positions: dict[str, int]
    """The position of each argument."""

    def value(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of an argument in a call, None where it was left to its default."""
        if name in kwargs:
            return kwargs[name]
        position = self.positions[name]
        return args[position] if position < len(args) else None


@cache
def _structured() -> frozenset[str]:
    key = "CompositeExplicitAutogradNonFunctional"
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def plan_of(op: Any) -> Plan:
    """Read an operator's schema."""
    schema = op._schema
    name = schema.name.split("::")[1]
    base = placement.base_name(schema.name)
    owner: dict[str, str] = {}
    writes: set[str] = set()
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is None:
            continue
        for label in alias.before_set:
            owner[label] = argument.name
        if alias.is_write:
            writes.add(argument.name)
    returns: list[tuple[str, str]] = []
    for result in schema.returns:
        alias = result.alias_info
        source = (
            next((owner[label] for label in alias.before_set if label in owner), None)
            if (alias is not None)
            else None
        )
        if source is None:
            returns.append(("new", ""))
        else:
            returns.append(("same" if alias.is_write else "view", source))
    names = tuple(argument.name for argument in schema.arguments)
    return Plan(
        op=op,
        name=name,
        overload=schema.overload_name,
        base=base,
        names=names,
        returns=tuple(returns),
        outs=tuple(argument.name for argument in schema.arguments if argument.is_out),
        writes=frozenset(writes),
        waits=_WAITS.get(base),
        seeded=torch.Tag.nondeterministic_seeded in op.tags,
        generator="generator" in names,
        has_device="device" in names,
        heavy=base in _HEAVY,
        scalars=base in placement.TAKES_HOST_SCALARS,
        device_only=placement.DEVICE_ONLY.get(base, frozenset()),
        host=placement.HOST_ARGUMENTS.get(base, frozenset()),
        host_scalars=placement.HOST_SCALAR_ARGUMENTS.get(base, frozenset()),
        indexing=base in placement.INDEXING,
        host_all=base in ("copy", "_foreach_copy", "_copy_from", "_to_copy", "set_data"),
        structured=f"{schema.name}.{schema.overload_name}".rstrip(".") in _structured(),
        positions={name: position for position, name in enumerate(names)},
    )
