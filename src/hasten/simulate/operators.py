"""The operators of the simulated device: the few of its own, and all others by the CPU's kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current, mixing, placement, sparse
from hasten.simulate.backend import on_host, strided, view_like
from hasten.simulate.kernel import alone, execute, rebind
from hasten.simulate.plan import Plan, plan_of
from hasten.simulate.recurrent import CELLS

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = torch.device("cpu")
# Views and questions about layout: PyTorch's own code for them runs on the tensor as it is, and
# comes back here as as_strided.
_NATIVE = frozenset(
    [
        "_conj",
        "_fw_primal",
        "_make_dual",
        "_neg_view",
        "_test_autograd_multiple_dispatch_view",
        "alias",
        "ccol_indices",
        "col_indices",
        "crow_indices",
        "detach",
        "diagonal",
        "expand",
        "indices",
        "lift_fresh",
        "permute",
        "row_indices",
        "select.int",
        "slice.Tensor",
        "slice_inverse",
        "split.Tensor",
        "split_with_sizes",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "t",
        "transpose.int",
        "unbind.int",
        "unsqueeze",
        "values",
        "view.dtype",
        "as_strided_",
        "detach_",
        "resize_as_",
        "squeeze_",
        "squeeze_.dim",
        "squeeze_.dims",
        "t_",
        "transpose_",
        "unsqueeze_",
        "fill.Tensor",
        "_assert_tensor_metadata",
        "_print",
        "allclose",
        "dense_dim",
        "is_coalesced",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "diagonal_scatter",
        "slice_scatter",
        "select_scatter",
        "as_strided_scatter",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "sparse_dim",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "record_stream",
    ]
)


def _as_strided(x: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    return strided(x, size, stride, x.storage_offset() if offset is None else offset)


def _reshape_alias(x: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    return strided(x, size, stride, x.storage_offset())


def _view(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    if -1 in size or not x.is_contiguous():
        return view_like(x, torch.ops.aten.view.default(on_host(x), size))
    if math.prod(size) != x.numel():
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {x.numel()}")
    return strided(x, size, _contiguous(size), x.storage_offset())


def _contiguous(size: list[int]) -> list[int]:
    stride = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(size[i + 1], 1)
    return stride


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    session = current.require()
    target = x if x.is_cpu else on_host(x)
    raw = source if source.is_cpu else on_host(source)
    session.copying(x, source, target, raw, non_blocking)
    torch.ops.aten.copy_.default(target, raw)
    session.copied(x, source, raw, non_blocking)
    return x


def _to_copy(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    session = current.require()
    raw = x if x.is_cpu else on_host(x)
    made: torch.Tensor = torch.ops.aten._to_copy.default(
        raw, dtype=dtype, layout=layout, device=_CPU, memory_format=memory_format
    )
    if device is not None and device.type == "cpu":
        if x.is_cpu:
            return made
        session.copied(made, x, raw, non_blocking)
        if non_blocking:
            session.host.pin(made)
        return made
    if device is not None and device.type == "meta":
        return torch.empty_like(raw, dtype=dtype, device=device)
    own = 0 if x.is_cpu else session.index_of(x)
    index = own if device is None or device.index is None else device.index
    out = session.adopt(made, index)
    if x.is_cpu or index != own:
        session.copied(out, x, raw, non_blocking)
    else:
        session.launch(None, index, (raw,), made)
    return out


def _set_storage(
    x: torch.Tensor, source: Any, offset: int = 0, size: Any = None, stride: Any = None
) -> torch.Tensor:
    untyped = source._untyped_storage if hasattr(source, "_untyped_storage") else source
    nbytes = untyped.nbytes()
    lent = torch._C._construct_storage_from_data_pointer(untyped.data_ptr(), _CPU, nbytes)
    if size is None:
        size = [nbytes // x.element_size()]
    if not stride:
        stride = _contiguous(list(size))
    raw = torch.empty(0, dtype=x.dtype)
    if nbytes:
        raw.set_(lent, offset, tuple(size), tuple(stride))
    else:
        raw = torch.empty(size, dtype=x.dtype)
    rebind(x, raw, track=False)
    x.untyped_storage().__dict__["_hasten_keeps"] = untyped
    return x


def _set_source_tensor(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    session = current.require()
    own, other = session.device_name(x), session.device_name(source)
    if own != other:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{own}" to a storage on different '
            f'device "{other}".  This is no longer allowed; the devices must match.'
        )
    torch._C.TensorBase.data.__set__(x, source.detach())  # type: ignore[attr-defined]
    return x


def _set_nothing(x: torch.Tensor) -> torch.Tensor:
    rebind(x, torch.empty(0, dtype=x.dtype))
    return x


def _resize(x: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
    stride = _contiguous(list(size))
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = list(torch.empty(size, device="meta", memory_format=memory_format).stride())
    count = math.prod(size)
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if count <= room:
        x.as_strided_(size, stride)
        return x
    raw = torch.empty_strided(tuple(size), tuple(stride), dtype=x.dtype)
    kept = room if room > 0 else 0
    if kept:
        whole = on_host(strided(x, [kept], [1], x.storage_offset()))
        torch.as_strided(raw, [kept], [1]).copy_(whole)
    rebind(x, raw)
    return x


def _pack(
    x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    session = current.require()
    if not lengths.is_cpu:
        kind = str(lengths.dtype).removeprefix("torch.")
        word = {"int64": "Long", "int32": "Int", "float32": "Float"}.get(kind, kind)
        message = (
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {session.device_name(lengths)} {word} tensor"
        )
        found = [("input", x), ("lengths", lengths)]
        mixing.report(session, "_pack_padded_sequence", found, message)
        lengths = on_host(lengths).clone()
    data, sizes = torch.ops.aten._pack_padded_sequence.default(on_host(x), lengths, batch_first)
    return session.adopt(data, session.index_of(x)), sizes


def _zero_tensor(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    session = current.require()
    index = 0 if device is None or device.index is None else device.index
    return session.adopt(torch.zeros(size, dtype=dtype), index)


def _attention_choice(*_: Any, **__: Any) -> int:
    return 0  # the mathematical form, which is made of the other operators


_OWN: dict[str, Callable[..., Any]] = {
    "as_strided": _as_strided,
    "_reshape_alias": _reshape_alias,
    "view": _view,
    "copy_": _copy,
    "_to_copy": _to_copy,
    "set_": _set_nothing,
    "set_.source_Storage": _set_storage,
    "set_.source_Storage_storage_offset": _set_storage,
    "set_.source_Tensor": _set_source_tensor,
    "resize_": _resize,
    "_pack_padded_sequence": _pack,
    "_efficientzerotensor": _zero_tensor,
    "_fused_sdp_choice": _attention_choice,
    **CELLS,
}


def _guarded(own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            if torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu"):
                return alone(own, *args, **kwargs)
            return own(*args, **kwargs)
        except RuntimeError as error:
            target = kwargs.get("device")
            index = None if target is None else target.index
            session = current.require()
            session.raise_if_full(error, current.thread.device if index is None else index)
            raise

    return kernel


def _generic(namespace: str, name: str) -> Callable[..., Any]:
    plan: Plan | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if plan is None:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops, namespace), packet)
            plan = plan_of(getattr(operator, overload or "default"))
        return execute(plan, args, kwargs)

    return kernel


_libraries: list[torch.library.Library] = []
_registered: dict[str, set[str]] = {}
"""By key, the operators that have a kernel or are to have none."""


def register() -> None:
    """Register a kernel for every operator that the CPU has one for.

    Runs at the start of each simulation and adds what is new (an extension imported since). The
    kernels stay: they serve tensors on the simulated device alone.
    """
    listed = torch._C._dispatch_get_registrations_for_dispatch_key
    host = {
        *listed("CPU"),
        *(f"aten::{name}" for name in _OWN),
        *(x for x in listed("CompositeExplicitAutograd") if x.startswith("aten::")),
        *(x for x in listed("CompositeExplicitAutogradNonFunctional") if x.startswith("aten::")),
    }
    _register(host, "PrivateUse1")
    for key, cpu in sparse.BACKENDS.items():
        _register(set(listed(cpu)), key)


def _register(host: set[str], key: str) -> None:
    """Register kernels under the key of one layout of simulated tensors."""
    known = _registered.setdefault(key, set())
    taken = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    by_namespace: dict[str, list[str]] = {}
    for full in sorted(host - known - taken):
        namespace, _, name = full.partition("::")
        if namespace in ("aten", "torchvision", "torchaudio"):
            by_namespace.setdefault(namespace, []).append(name)
        known.add(full)
    for namespace, names in by_namespace.items():
        make: Any = torch.library.Library
        library = make(namespace, "IMPL")
        _libraries.append(library)
        for name in names:
            kernel = _kernel(namespace, name, key)
            if kernel is not None:
                library.m.impl(name, key, kernel, False)


def _kernel(namespace: str, name: str, key: str) -> Callable[..., Any] | None:
    """The kernel of an operator under a key, None where PyTorch's own code is to run or none."""
    if namespace == "aten" and name.startswith(placement.CPU_ONLY):
        return None
    if key in sparse.BACKENDS:
        return sparse.structural(namespace, name, key) or _generic(namespace, name)
    if namespace != "aten":
        return _generic(namespace, name)
    if name in _NATIVE:
        return None
    own = _OWN.get(name)
    return _generic(namespace, name) if own is None else _guarded(own)
