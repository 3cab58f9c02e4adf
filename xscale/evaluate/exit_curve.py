"""Accuracy against compute: evaluations of a model whose tokens leave at its exits, at several thresholds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.generate.exit_policy import stack_with_exits
from xscale.mesh.collectives import sum_scalars
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, ExitPolicyConfig
from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import Batch


@dataclass(frozen=True)
class ExitPoint:
    """One threshold of a policy."""

    threshold: float | None
    """None: no token leaves."""
    blocks: float
    """Fraction of the blocks that a token is computed in, in the mean over all tokens."""
    loss: float
    """Mean over the targets, in nats."""
    accuracy: float
    """Fraction of the targets that are predicted."""


def exit_curve(
    model: nn.Module,
    batches: Callable[[], Iterable[tuple[Batch, bool]]],
    policy: ExitPolicyConfig,
    thresholds: Sequence[float | None],
) -> list[ExitPoint]:
    """Evaluate a model with exits at each threshold. Collective over all ranks.

    `batches` returns the micro-batches of one evaluation, with a flag that is false for those that do not count.
    """
    model.eval()
    return [_point(model, batches(), policy, threshold) for threshold in thresholds]


def score(logits: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return the loss of logits [B, T, V], summed in nats, how many targets [B, T] they predict, and how many there
    are."""
    is_target = targets != IGNORE_INDEX
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    nats = F.cross_entropy(upcast, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    right = ((logits.argmax(-1) == targets) & is_target).sum()
    return float(nats), float(right), float(is_target.sum())


@torch.no_grad()
def _point(
    model: nn.Module, batches: Iterable[tuple[Batch, bool]], policy: ExitPolicyConfig, threshold: float | None
) -> ExitPoint:
    stack = stack_with_exits(model)
    assert stack is not None, "the model has no exits"
    sums = [0.0] * 5
    device = next(model.parameters()).device
    for batch, counts in batches:
        early = None if threshold is None else EarlyExit(policy.model_copy(update={"threshold": threshold}))
        logits: Any = model(batch.tokens.with_signals({EARLY_EXIT: early}), None, batch.source)
        if not counts:
            continue
        targets = batch.targets
        computed = targets.numel() * len(stack.blocks)
        if early is not None:
            assert early.blocks is not None, "a stack with exits has at least one"
            computed = int(early.blocks.sum())
        batch_sums = [*score(logits, targets), float(computed), float(targets.numel())]
        sums = [total + value for total, value in zip(sums, batch_sums, strict=True)]
    nats_sum, rights, count, blocks, tokens = sum_scalars(sums, device)
    share = blocks / max(tokens * len(stack.blocks), 1)
    return ExitPoint(threshold, share, nats_sum / max(count, 1), rights / max(count, 1))
