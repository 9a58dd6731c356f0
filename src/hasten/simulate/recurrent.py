"""The fused LSTM and GRU cells that CUDA has and the CPU has not, and their derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current
from hasten.simulate.backend import on_host

if TYPE_CHECKING:
    from collections.abc import Callable

Maybe = torch.Tensor | None


def _with_bias(gates: torch.Tensor, bias: Maybe) -> torch.Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[torch.Tensor, ...]:
    gates = _with_bias(hidden_gates, hidden_bias) + _with_bias(input_gates, input_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Maybe,
    grad_cy: Maybe,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[Maybe, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - squashed * squashed)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    gates = torch.cat(
        [
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_hy * squashed * o * (1 - o),
        ],
        1,
    )
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def _gru(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[torch.Tensor, ...]:
    ir, iz, in_ = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (hr + ir).sigmoid(), (hz + iz).sigmoid()
    n = (in_ + hn * r).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hn], 1)


def _gru_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[Maybe, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * hn * r * (1 - r)
    from_input = torch.cat([grad_r, grad_z, grad_n], 1)
    from_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (from_input.sum(0), from_hidden.sum(0)) if has_bias else (None, None)
    return from_input, from_hidden, grad_hy * z, *biases


def _on_host(cell: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        session = current.require()
        given = [*args, *kwargs.values()]
        first = next(x for x in given if isinstance(x, torch.Tensor))
        index = session.index_of(first)
        raw = [on_host(x) if isinstance(x, torch.Tensor) else x for x in args]
        named = {k: on_host(x) if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
        made = cell(*raw, **named)
        session.launch(None, index, raw, made)
        return tuple(x if x is None else session.adopt(x, index) for x in made)

    return kernel


CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _on_host(_lstm),
    "_thnn_fused_lstm_cell_backward_impl": _on_host(_lstm_backward),
    "_thnn_fused_gru_cell": _on_host(_gru),
    "_thnn_fused_gru_cell_backward": _on_host(_gru_backward),
}
"""The kernels, by operator."""
