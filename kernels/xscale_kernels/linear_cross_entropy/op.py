"""linear_cross_entropy: the output projection and its softmax loss without the logits (Hsu et al. 2024, Liger)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from xscale_kernels import refusals, torch_private
from xscale_kernels.cross_entropy.op import LossTerms, reference_cross_entropy
from xscale_kernels.select import Implementation, choose


def reference_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    terms: LossTerms,
) -> torch.Tensor:
    """Each token's loss [N], in float32 at least. Shapes as in `linear_cross_entropy`."""
    return reference_cross_entropy(F.linear(hidden, weight, bias), targets, terms)


def _liger(hidden: torch.Tensor, _: torch.Tensor) -> str | None:
    return refusals.unless_liger(hidden)


_HERE = "xscale_kernels.linear_cross_entropy"
IMPLEMENTATIONS = (
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("liger", f"{_HERE}.libraries", _liger, prefix="liger_"),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.library.custom_op("xscale::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    token_weights: torch.Tensor | None,
    summed: bool,
    at_once: bool,
    chunk: int,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = choose(
        "linear_cross_entropy", IMPLEMENTATIONS, implementation, hidden, weight
    ).implementation.function("forward")
    terms = LossTerms(ignore_index, softcap, z_loss, label_smoothing)
    scale = token_weights
    if at_once and scale is None:
        scale = hidden.new_ones(hidden.shape[0], dtype=_wide(hidden))
    loss, lse, gradients = chosen(
        hidden, weight, bias, targets, scale if at_once else None, terms, chunk
    )
    if summed:
        loss = (
            loss.sum() if token_weights is None else torch.dot(loss, token_weights.to(loss.dtype))
        )
    nothing = [hidden.new_empty(0) for _ in range(3)]
    if gradients is None:
        return loss, lse, *nothing
    return (
        loss,
        lse,
        gradients.hidden,
        gradients.weight,
        nothing[0] if gradients.bias is None else gradients.bias,
    )


@_forward.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    token_weights: torch.Tensor | None,
    summed: bool,
    at_once: bool,
    *_: Any,
) -> Five:
    lse = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
    loss = lse.new_empty(()) if summed else torch.empty_like(lse)
    nothing = [hidden.new_empty(0) for _ in range(3)]
    if not at_once:
        return loss, lse, nothing[0], nothing[1], nothing[2]
    dbias = nothing[0] if bias is None else torch.empty_like(bias)
    return loss, lse, torch.empty_like(hidden), torch.empty_like(weight), dbias


@torch.library.custom_op("xscale::linear_cross_entropy_backward", mutates_args=())
def _backward_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    chunk: int,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = choose(
        "linear_cross_entropy (backward)", IMPLEMENTATIONS, implementation, hidden, weight
    )
    terms = LossTerms(ignore_index, softcap, z_loss, label_smoothing)
    gradients = chosen.implementation.function("backward")(
        hidden, weight, bias, targets, lse, seed, terms, chunk
    )
    return (
        gradients.hidden,
        gradients.weight,
        hidden.new_empty(0) if gradients.bias is None else gradients.bias,
    )


@_backward_op.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> Three:
    dbias = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Five) -> None:
    hidden, weight, bias, targets, _, ctx.summed, ctx.at_once, *ctx.settings = inputs
    ctx.has_bias = bias is not None
    # The other outputs have no gradients: zeros for them would be as large as the weight.
    ctx.set_materialize_grads(False)
    if ctx.at_once:
        ctx.save_for_backward(*output[2:])
    else:
        ctx.save_for_backward(
            hidden, weight, targets, output[1], *(() if bias is None else (bias,))
        )


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 13
    if ctx.at_once:
        # In place, unless this pass is traced or may be repeated: a copy of the weight's gradient is as large as the
        # weight.
        in_place = (
            type(dloss) is torch.Tensor
            and not torch.compiler.is_compiling()
            and not torch_private.keeps_graph()
        )
        # Detached: autograd returns saved outputs as views, which nobody could add to with gradients enabled.
        gradients = [
            kept.detach().mul_(dloss.to(kept.dtype)) if in_place else kept * dloss.to(kept.dtype)
            for kept in ctx.saved_tensors
        ]
    else:
        hidden, weight, targets, lse, *bias = ctx.saved_tensors
        gradients = list(
            _backward_op(
                hidden,
                weight,
                bias[0] if bias else None,
                targets,
                lse,
                dloss.contiguous(),
                *ctx.settings,
            )
        )
    return gradients[0], gradients[1], gradients[2] if ctx.has_bias else None, *[None] * 10


_forward.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.xscale.linear_cross_entropy)
def _forward_flops(
    hidden: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    token_weights: Any,
    summed: bool,
    at_once: bool,
    *_: Any,
    **__: Any,
) -> int:
    return (6 if at_once else 2) * int(hidden[0]) * int(weight[0]) * int(weight[1])


@register_flop_formula(torch.ops.xscale.linear_cross_entropy_backward)
def _backward_flops(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 6 * int(hidden[0]) * int(weight[0]) * int(weight[1])


def default_chunk(V: int, device: torch.device) -> int:
    """Tokens in one block of logits.

    On CPU as many as give 16 MB of float32, which stay in its cache, and at least 128. Elsewhere at least 2048, since
    smaller products leave a GPU idle, and more in a small vocabulary: 256 MB in half precision.
    """
    budget, least = (2**22, 128) if device.type == "cpu" else (2**27, 2048)
    return max(least, 1 << (max(budget // max(V, 1), 1).bit_length() - 1))


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    reduction: Literal["none", "sum"] = "sum",
    token_weights: torch.Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Cross entropy of softmax(hidden @ weight^T + bias) against targets; the [N, V] logits never exist at once.

    hidden: [N, D]. weight: [V, D] and bias: [V] of the same dtype. targets: [N] int64 in [0, V) or ignore_index.
    token_weights: [N], constants that weigh each token's loss (needs reduction "sum"; no gradient reaches them).
    softcap, z_loss, label_smoothing: as in LossTerms; None or 0 for none. chunk: tokens in one block.
    Returns the loss in nats, float32 (float64 for float64 inputs): [N] for "none", a scalar for "sum".

    With "sum" the gradients are made in the forward sweep: three products in all, as the plain way, and no logits are
    made twice. With "none" the backward makes the logits again, because each token's weight is known only there.
    Gradients reach hidden, weight and bias, once (no second derivatives).

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    (N, D), V = hidden.shape, weight.shape[0]
    if weight.shape != (V, D) or targets.shape != (N,) or (bias is not None and bias.shape != (V,)):
        raise ValueError(
            "linear_cross_entropy takes hidden [N, D], weight [V, D], targets [N], bias [V] or None, got "
            f"{[*hidden.shape]}, {[*weight.shape]}, {[*targets.shape]}, {None if bias is None else [*bias.shape]}"
        )
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(
            f"hidden, weight and bias must have one dtype, got {hidden.dtype} and {weight.dtype}"
        )
    if reduction not in ("none", "sum"):
        raise ValueError(f"reduction is 'none' or 'sum', not '{reduction}'")
    if token_weights is not None and (reduction != "sum" or token_weights.shape != (N,)):
        raise ValueError(
            "token_weights are [N] and need reduction='sum'; with 'none' multiply the losses instead"
        )
    LossTerms(ignore_index, softcap or 0.0, z_loss, label_smoothing)
    if implementation == "reference":
        losses = reference_linear_cross_entropy(
            hidden,
            weight,
            bias,
            targets,
            LossTerms(ignore_index, softcap or 0.0, z_loss, label_smoothing),
        )
        return (
            losses
            if reduction == "none"
            else (losses if token_weights is None else losses * token_weights).sum()
        )
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    )
    loss: torch.Tensor = _forward(
        hidden,
        weight,
        bias,
        targets,
        None if token_weights is None else token_weights.detach(),
        reduction == "sum",
        reduction == "sum" and learns,
        chunk or default_chunk(V, hidden.device),
        ignore_index,
        softcap or 0.0,
        z_loss,
        label_smoothing,
        implementation or "",
    )[0]
    return loss
