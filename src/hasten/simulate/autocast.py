"""``torch.autocast("cuda")`` on the simulated device: which operators run in which dtype."""

from __future__ import annotations

from typing import Any

import torch

from hasten.simulate.backend import BACKEND

_key: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
_KEY = torch._C.DispatchKeySet(_key)
_library: list[torch.library.Library] = []

_LOWER = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
]
_FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "rms_norm",
]
_SET_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
    "linalg_vector_norm",
    "linalg_matrix_norm",
]
_PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "vdot",
    "cat",
    "stack",
]


def _eligible(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and not x.is_cpu
        and x.is_floating_point()
        and x.dtype is not torch.float64
    )


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.ops.aten.to.dtype(x, dtype) if _eligible(x) and x.dtype != dtype else x
    if isinstance(x, (list, tuple)):
        return [_cast(y, dtype) for y in x]
    return x


def _leaves(values: Any) -> Any:
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


def _make(name: str, how: str) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    has_dtype = any(argument.name == "dtype" for argument in op._schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if how == "lower":
                dtype = torch.get_autocast_dtype(BACKEND)
            elif how == "float32":
                dtype = torch.float32
            elif how == "promote":
                wide = any(_eligible(x) and x.dtype is torch.float32 for x in _leaves(args))
                dtype = torch.float32 if wide else torch.get_autocast_dtype(BACKEND)
            else:
                if has_dtype and kwargs.get("dtype") is None and _eligible(args[0]):
                    position = [a.name for a in op._schema.arguments].index("dtype")
                    if position >= len(args):
                        return op(*args, **{**kwargs, "dtype": torch.float32})
                return op(*args, **kwargs)
            cast = [_cast(x, dtype) for x in args]
            return op(*cast, **{key: _cast(x, dtype) for key, x in kwargs.items()})

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss.  "
        "binary_cross_entropy_with_logits and BCEWithLogits are\nsafe to autocast."
    )


def register() -> None:
    """Register the rules once a process; they serve tensors on the simulated device alone."""
    if _library:
        return
    make: Any = torch.library.Library
    others = make("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = make("aten", "IMPL")
    _library.extend((library, others))
    known = set(torch._C._dispatch_get_all_op_names())
    groups = (("lower", _LOWER), ("float32", _FLOAT32), ("set", _SET_DTYPE), ("promote", _PROMOTE))
    for how, names in groups:
        for name in names:
            if f"aten::{name}" in known:
                kernel = _make(name, how)
                library.m.impl(name, "AutocastPrivateUse1", kernel, False)
    library.m.impl("binary_cross_entropy", "AutocastPrivateUse1", _banned, False)


def functions() -> dict[str, Any]:
    """Functions of `torch` that keep the backend's autocast state equal to CUDA's."""
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        device = args[0] if len(args) == 2 else kwargs.get("device_type", "cuda")
        if device == "cuda":
            enable(BACKEND, args[-1] if args else kwargs["enabled"])

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        choose(device_type, dtype)
        if device_type == "cuda":
            choose(BACKEND, dtype)

    choose(BACKEND, torch.get_autocast_dtype("cuda"))
    return {
        "set_autocast_enabled": set_autocast_enabled,
        "set_autocast_dtype": set_autocast_dtype,
        "set_autocast_gpu_dtype": lambda dtype: set_autocast_dtype("cuda", dtype),
    }
