"""cross_entropy: softmax loss of logits with soft cap, z-loss and label smoothing, one pass forward, one backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from xscale_kernels import refusals
from xscale_kernels.select import Implementation, choose


@dataclass(frozen=True)
class LossTerms:
    """Loss options: lse - (1 - s) * logit[target] - s * mean(logits) + z * lse^2, with lse = log sum exp(logits)."""

    ignore_index: int = -100
    """A token with this target has loss 0 and no gradient."""
    softcap: float = 0.0
    """Above 0, logits are first squashed to softcap * tanh(logits / softcap) (Gemma Team 2024)."""
    z_loss: float = 0.0
    """z above: keeps the normaliser near 1 (Chowdhery et al. 2022, PaLM)."""
    label_smoothing: float = 0.0
    """s above (Szegedy et al. 2016)."""

    def __post_init__(self) -> None:
        if self.softcap < 0 or self.z_loss < 0 or not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"softcap and z_loss must be >= 0 and label_smoothing in [0, 1), got {self}"
            )


def reference_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms
) -> torch.Tensor:
    """Each token's loss [N], in float32 at least. logits [N, V], targets [N]."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    kept = targets != terms.ignore_index
    lse = scores.logsumexp(1)  # [N]
    picked = scores.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    loss = lse - (1 - terms.label_smoothing) * picked + terms.z_loss * lse.square()
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing * scores.mean(1)
    return loss.where(kept, 0.0)


def _quack(logits: torch.Tensor, terms: LossTerms) -> str | None:
    if terms.softcap or terms.z_loss or terms.label_smoothing:
        return "quack has no soft cap, z-loss or label smoothing"
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not logits.numel():
        return "quack needs logits of bfloat16, float16 or float32"
    return refusals.unless_library(logits, "quack", (9, 0))


_HERE = "xscale_kernels.cross_entropy"
IMPLEMENTATIONS = (
    Implementation("quack", f"{_HERE}.libraries", _quack, prefix="quack_"),
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("torch", f"{_HERE}.chunked", refusals.never),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


@torch.library.custom_op("xscale::cross_entropy", mutates_args=())
def _forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    terms = LossTerms(ignore_index, softcap, z_loss, label_smoothing)
    choice = choose("cross_entropy", IMPLEMENTATIONS, implementation, logits, terms)
    out: tuple[torch.Tensor, torch.Tensor] = choice.implementation.function("forward")(
        logits, targets, terms
    )
    return out


@_forward.register_fake
def _(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    compute = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(logits.shape[0], dtype=compute), logits.new_empty(
        logits.shape[0], dtype=compute
    )


@torch.library.custom_op("xscale::cross_entropy_backward", mutates_args=())
def _back(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
    implementation: str,
) -> torch.Tensor:
    terms = LossTerms(ignore_index, softcap, z_loss, label_smoothing)
    choice = choose("cross_entropy (backward)", IMPLEMENTATIONS, implementation, logits, terms)
    out: torch.Tensor = choice.implementation.function("backward")(
        logits, targets, lse, seed, terms
    )
    return out


@_back.register_fake
def _(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, targets, *ctx.settings = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _backward(ctx: Any, dloss: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return _back(*ctx.saved_tensors, dloss.contiguous(), *ctx.settings), *[None] * 6


_forward.register_autograd(_backward, setup_context=_keep)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: Literal["none", "sum"] = "none",
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    implementation: str | None = None,
) -> torch.Tensor:
    """Cross entropy of softmax(logits) against targets; LossTerms documents the options.

    logits: [N, V] of any float dtype; -inf excludes an entry (not with label smoothing). targets: [N] int64
    in [0, V) or ignore_index. Returns the loss in nats, float32 (float64 for float64): [N] for "none", a scalar for
    "sum". The backward recomputes the softmax from the logits, so [N] numbers are saved and not [N, V].

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits [N, V], targets [N], got {[*logits.shape]}, {[*targets.shape]}"
        )
    if reduction not in ("none", "sum"):
        raise ValueError(f"reduction is 'none' or 'sum', not '{reduction}'")
    terms = LossTerms(ignore_index, softcap or 0.0, z_loss, label_smoothing)
    if implementation == "reference":
        losses = reference_cross_entropy(logits, targets, terms)
        return losses.sum() if reduction == "sum" else losses
    loss: torch.Tensor = _forward(
        logits,
        targets,
        terms.ignore_index,
        terms.softcap,
        terms.z_loss,
        terms.label_smoothing,
        implementation or "",
    )[0]
    return loss.sum() if reduction == "sum" else loss
