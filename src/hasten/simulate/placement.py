"""Where CUDA lets the tensors of an operator lie: the rules, and the words of the refusal.

PyTorch checks most CUDA operators argument by argument: every tensor on one device. Operators
that run through its TensorIterator take single CPU numbers (0-dimensional tensors) as well, and
a few take a certain argument on the CPU. The lists follow ``native_functions.yaml``
(``device_check: NoCheck``) and the CUDA kernels' own checks.
"""

from __future__ import annotations

import torch

# What CUDA has no kernel for: PyTorch refuses them.
CPU_ONLY = (
    "histogram.",
    "_histogramdd_",
    "_upsample_lanczos2d_aa",
    "_spdiags",
    "from_file",
    "_add_relu",
    "_weight_int4pack_mm_for_cpu",
    "_convert_weight_to_int4pack_for_cpu",
    "_sparse_mm_reduce_impl",
)

# Element-wise operators with several tensors that take a 0-dimensional CPU tensor: the base names.
TAKES_HOST_SCALARS = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "true_divide",
        "floor_divide",
        "copysign",
        "logical_xor",
        "logical_and",
        "logical_or",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "__and__",
        "__or__",
        "__xor__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__lshift__",
        "__rshift__",
        "__ilshift__",
        "__irshift__",
        "xlogy",
        "special_xlog1py",
        "special_xlogy",
        "special_zeta",
        "special_chebyshev_polynomial_t",
        "special_chebyshev_polynomial_u",
        "special_chebyshev_polynomial_v",
        "special_chebyshev_polynomial_w",
        "special_hermite_polynomial_h",
        "special_hermite_polynomial_he",
        "special_laguerre_polynomial_l",
        "special_legendre_polynomial_p",
        "special_shifted_chebyshev_polynomial_t",
        "special_shifted_chebyshev_polynomial_u",
        "special_shifted_chebyshev_polynomial_v",
        "special_shifted_chebyshev_polynomial_w",
        "eq",
        "ne",
        "ge",
        "le",
        "gt",
        "lt",
        "atan2",
        "fmod",
        "hypot",
        "remainder",
        "fmin",
        "fmax",
        "maximum",
        "minimum",
        "pow",
        "heaviside",
        "mse_loss",
        "smooth_l1_loss",
        "lerp",
        "addcmul",
        "addcdiv",
        "where",
        "dist",
        "ldexp",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
        "_foreach_add",
        "_foreach_sub",
        "_foreach_mul",
        "_foreach_div",
        "_foreach_maximum",
        "_foreach_minimum",
        "_foreach_clamp_max",
        "_foreach_clamp_min",
        "_foreach_pow",
        "_foreach_addcmul",
        "_foreach_addcdiv",
    ]
)

# Arguments that may (or must) lie on the CPU whatever their shape, by operator base name.
HOST_ARGUMENTS: dict[str, frozenset[str]] = {
    "index": frozenset({"indices"}),
    "index_put": frozenset({"indices"}),
    "_unsafe_index": frozenset({"indices"}),
    "_unsafe_index_put": frozenset({"indices"}),
    "_index_put_impl": frozenset({"indices"}),
    "copy": frozenset({"self", "src"}),
    "_foreach_copy": frozenset({"self", "src"}),
    "_copy_from": frozenset({"self", "dst"}),
    "_to_copy": frozenset({"self"}),
    "_pack_padded_sequence": frozenset({"lengths"}),
    "_pad_packed_sequence": frozenset({"batch_sizes"}),
    "_ctc_loss": frozenset({"input_lengths", "target_lengths"}),
    "_ctc_loss_backward": frozenset({"input_lengths", "target_lengths"}),
    "set_data": frozenset({"self", "new_data"}),
}

# Arguments that may be a 0-dimensional CPU tensor in operators that are otherwise strict.
HOST_SCALAR_ARGUMENTS: dict[str, frozenset[str]] = {
    "masked_fill": frozenset({"value"}),
    "index_fill": frozenset({"value"}),
    "fill": frozenset({"value"}),
    "index_put": frozenset({"values"}),
    "_unsafe_index_put": frozenset({"values"}),
    "_index_put_impl": frozenset({"values"}),
    "linspace": frozenset({"start", "end"}),
    "logspace": frozenset({"start", "end"}),
    "_fused_adam": frozenset({"lr", "grad_scale", "found_inf"}),
    "_fused_adamw": frozenset({"lr", "grad_scale", "found_inf"}),
    "_fused_sgd": frozenset({"lr", "grad_scale", "found_inf"}),
    "_fused_adagrad": frozenset({"lr", "grad_scale", "found_inf"}),
}

# Of the element-wise operators, arguments that must lie on the device even when 0-dimensional.
DEVICE_ONLY: dict[str, frozenset[str]] = {
    "addcmul": frozenset({"self"}),
    "addcdiv": frozenset({"self"}),
}

# Operators that CUDA makes of others: the operator and the argument that a refusal names.
_NAMED_AS: dict[str, tuple[str, str]] = {"embedding": ("_index_select", "index")}

INDEXING = frozenset(
    {"index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"}
)


def base_name(name: str) -> str:
    """The operator's name without namespace, overload and the in-place underscore."""
    plain = name.split("::")[-1].split(".")[0]
    return plain.rstrip("_") if not plain.endswith("__") else plain


def refusal(
    name: str, overload: str, argument: str, first: str, second: str, *, structured: bool
) -> str:
    """The message of PyTorch for an operator whose tensors lie on two devices.

    Args:
        name: the operator's name, without the namespace.
        overload: the overload's name, empty for the default.
        argument: the name of the argument that lies elsewhere.
        first: the device that the operator had settled on.
        second: the device of that argument.
        structured: whether PyTorch generates the operator from a structured kernel.
    """
    base = base_name(name)
    if base in INDEXING:
        if argument == "indices":
            return (
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({first})"
            )
        return (
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}!"
        )
    if base == "masked_fill" and argument == "mask":
        return (
            f"expected self and mask to be on the same device, but got mask on {second} and "
            f"self on {first}"
        )
    if base == "convolution":
        kinds = {"cpu": "torch.FloatTensor"}
        one, other = (kinds.get(x, "torch.cuda.FloatTensor") for x in (first, second))
        return f"Input type ({one}) and {argument} type ({other}) should be the same"
    message = (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )
    if base in TAKES_HOST_SCALARS:
        return message
    if name in _NAMED_AS:
        name, argument = _NAMED_AS[name]
        overload, structured = "", True
    parts = (name, overload) if structured else (overload, name)
    method = "_".join(parts) if overload else parts[0] or f"_{name}"
    return (
        f"{message} (when checking argument for argument {argument} in method "
        f"wrapper_CUDA_{method})"
    )


def sparse_refusal(message: str, base: str, argument: str, layouts: set[torch.layout]) -> str:
    """The message of `refusal` as the kernels for sparse tensors have it.

    Args:
        message: what `refusal` says.
        base: the operator's base name.
        argument: the argument on the CPU.
        layouts: the sparse layouts of the operator's tensors.
    """
    compressed = torch.sparse_coo not in layouts
    if base == "add" and not compressed and "cpu" in message:
        return f"add: expected '{argument}' to be a CUDA tensor, but got a CPU tensor"
    key = "SparseCsrCUDA" if compressed else "SparseCUDA"
    return message.replace("wrapper_CUDA_", f"wrapper_{key}_")
