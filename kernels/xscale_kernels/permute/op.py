"""permute and unpermute: copies of tokens in the experts' order, and their weighted sum back (Lepikhin et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch

from xscale_kernels import refusals, torch_private
from xscale_kernels.select import Implementation, choose, is_small_call


def reference_permute(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Row m of the result is row tokens[m] of x."""
    return x.index_select(0, tokens)  # [M, D]


def reference_unpermute(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    N: int,
    token_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row n of the result is the sum of weights[m] * y[m] over the m with tokens[m] = n."""
    compute = torch.promote_types(y.dtype, torch.float32)
    rows = y.to(compute)
    if weights is not None:
        rows = rows * weights.to(compute)[:, None]
    return rows.new_zeros(N, y.shape[1]).index_add(0, tokens, rows).to(y.dtype)  # [N, D]


def reference_spread(
    dout: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the weighted unpermute: dy [M, D] and dweights [M]."""
    compute = torch.promote_types(y.dtype, torch.float32)
    rows = dout.index_select(0, tokens).to(compute)
    dweights = (rows * y.to(compute)).sum(1).to(weights.dtype)
    return (rows * weights.to(compute)[:, None]).to(y.dtype), dweights


def sorted_rows(
    tokens: torch.Tensor, N: int, token_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [M] by token, and where those of each token start [N + 1]: sorted only where `token_rows` is not given."""
    if token_rows is not None:
        k = token_rows.shape[1]
        return token_rows.flatten(), torch.arange(0, N * k + 1, max(k, 1), device=tokens.device)
    ordered, order = tokens.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(N + 1, device=tokens.device))


_HERE = "xscale_kernels.permute"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu),
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.library.custom_op("xscale::permute", mutates_args=())
def _permute(
    x: torch.Tensor, tokens: torch.Tensor, token_rows: torch.Tensor | None, implementation: str
) -> torch.Tensor:
    return x.index_select(0, tokens)


@_permute.register_fake
def _(
    x: torch.Tensor, tokens: torch.Tensor, token_rows: torch.Tensor | None, implementation: str
) -> torch.Tensor:
    return x.new_empty(tokens.shape[0], x.shape[1])


def _unpermute_directly(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    token_rows: torch.Tensor | None,
    N: int,
    implementation: str,
) -> torch.Tensor:
    if is_small_call(implementation, y):
        chosen = IMPLEMENTATIONS[0]
    else:
        chosen = choose("permute (back)", IMPLEMENTATIONS, implementation, y).implementation
    out: torch.Tensor = chosen.function("unpermute")(y, tokens, weights, N, token_rows)
    return out


_unpermute = torch.library.custom_op("xscale::unpermute", _unpermute_directly, mutates_args=())


@_unpermute.register_fake
def _(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    token_rows: torch.Tensor | None,
    N: int,
    implementation: str,
) -> torch.Tensor:
    return y.new_empty(N, y.shape[1])


@torch.library.custom_op("xscale::unpermute_backward", mutates_args=())
def _spread(
    dout: torch.Tensor,
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = choose(
        "permute (back, gradient)", IMPLEMENTATIONS, implementation, y
    ).implementation.function("spread")
    out: tuple[torch.Tensor, torch.Tensor] = chosen(dout, y, tokens, weights)
    return out


@_spread.register_fake
def _(
    dout: torch.Tensor,
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(weights)


def _keep_permute(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, tokens, token_rows, ctx.implementation = inputs
    ctx.N = x.shape[0]
    ctx.save_for_backward(tokens, token_rows)


def _permute_backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    tokens, token_rows = ctx.saved_tensors
    return _unpermute(dout, tokens, None, token_rows, ctx.N, ctx.implementation), None, None, None


def _keep_unpermute(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, tokens, weights, token_rows, _, ctx.implementation = inputs
    # Without weights the gradient needs no y, so a large tensor is not kept alive.
    ctx.save_for_backward(tokens, token_rows, *(() if weights is None else (y, weights)))


def _unpermute_backward(
    ctx: Any, dout: torch.Tensor
) -> tuple[torch.Tensor, None, torch.Tensor | None, None, None, None]:
    tokens, token_rows, *weighted = ctx.saved_tensors
    if not weighted:
        return _permute(dout, tokens, token_rows, ctx.implementation), None, None, None, None, None
    y, weights = weighted
    dy, dweights = _spread(dout, y, tokens, weights, ctx.implementation)
    return dy, None, dweights, None, None, None


_permute.register_autograd(_permute_backward, setup_context=_keep_permute)
_unpermute.register_autograd(_unpermute_backward, setup_context=_keep_unpermute)


def _check_rows(tokens: torch.Tensor, N: int, token_rows: torch.Tensor | None) -> None:
    if token_rows is not None and (
        token_rows.dim() != 2 or len(token_rows) != N or token_rows.numel() != len(tokens)
    ):
        raise ValueError(
            f"token_rows are [N, k] with N={N} and N * k = {len(tokens)}, got {[*token_rows.shape]}"
        )


def permute(
    x: torch.Tensor,
    tokens: torch.Tensor,
    *,
    token_rows: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Row m of the result is row tokens[m] of x.

    x: [N, D]. tokens: [M] int64 in [0, N); a token may come any number of times. token_rows: [N, k] int64, the rows of
    each token where all have k of them, which the backward would else sort for; not checked. Returns [M, D].
    The gradient to x is summed over copies in float32 at least, in a fixed order on CPU and in Triton.
    """
    if x.dim() != 2 or tokens.dim() != 1:
        raise ValueError(
            f"permute takes x [N, D] and tokens [M], got {[*x.shape]} and {[*tokens.shape]}"
        )
    _check_rows(tokens, len(x), token_rows)
    if torch_private.calls_directly(x):
        return x.index_select(0, tokens)
    out: torch.Tensor = _permute(x, tokens, token_rows, implementation or "")
    return out


def unpermute(
    y: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    N: int,
    *,
    token_rows: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Row n of the result is the sum of weights[m] * y[m] over the m with tokens[m] = n; zeros where there is none.

    y: [M, D]. tokens: [M] int64 in [0, N). weights: [M] of any float dtype, or None for ones. token_rows: as in
    `permute`. Returns [N, D] of y's dtype, summed in float32 at least, in a fixed order on CPU and in Triton. Gradients
    reach y and weights.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if (
        y.dim() != 2
        or tokens.shape != y.shape[:1]
        or (weights is not None and weights.shape != tokens.shape)
    ):
        raise ValueError(
            f"unpermute takes y [M, D], tokens [M], weights [M] or None, got {[*y.shape]}, {[*tokens.shape]}, "
            f"{None if weights is None else [*weights.shape]}"
        )
    _check_rows(tokens, N, token_rows)
    call = _unpermute_directly if torch_private.calls_directly(y) else _unpermute
    out: torch.Tensor = call(y, tokens, weights, token_rows, N, implementation or "")
    return out
