"""Quality against compute: evaluations of a model whose tokens leave at its exits, at several thresholds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xscale.evaluate.logit_scores import LogitScores
from xscale.generate.exit_policy import stack_with_exits
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, ExitPolicyConfig
from xscale.nn.depth.exits import Exits
from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import Batch


@dataclass(frozen=True)
class ExitPoint:
    """One threshold of a policy."""

    threshold: float | None
    """None: no token leaves."""
    blocks: float
    """Fraction of the blocks that were computed, in the mean over all predictions: of tokens, words or examples."""
    loss: float
    """Mean over the targets, in nats; of scores the mean squared error."""
    metrics: dict[str, float]
    """The accuracy; of an objective on labels all of its metrics."""


def exit_curve(
    model: nn.Module,
    batches: Callable[[], Iterable[tuple[Batch, bool]]],
    policy: ExitPolicyConfig,
    thresholds: Sequence[float | None],
    new_scores: Callable[[], LogitScores],
) -> list[ExitPoint]:
    """Evaluate a model with exits at each threshold. Collective over all ranks.

    `batches` returns the micro-batches of one evaluation, with a flag that is false for those that do not count, and
    `new_scores` what scores them.
    """
    model.eval()
    return [_point(model, batches(), policy, threshold, new_scores()) for threshold in thresholds]


@torch.no_grad()
def _point(
    model: nn.Module,
    batches: Iterable[tuple[Batch, bool]],
    policy: ExitPolicyConfig,
    threshold: float | None,
    scores: LogitScores,
) -> ExitPoint:
    stack = stack_with_exits(model)
    exits = None if stack is None else stack.find(Exits)
    assert stack is not None, "the model has no exits"
    assert exits is not None
    for batch, counts in batches:
        early = None
        if threshold is not None:
            early = EarlyExit(
                policy.model_copy(update={"threshold": threshold}), exits.pooled(batch.targets)
            )
        logits: Any = model(batch.tokens.with_signals({EARLY_EXIT: early}), None, batch.source)
        if not counts:
            continue
        is_target = batch.targets != IGNORE_INDEX
        blocks = float(is_target.sum()) * len(stack.blocks)
        computed = blocks
        if early is not None:
            assert early.blocks is not None, "a stack with exits has at least one"
            computed = float(early.blocks[is_target].sum())
        scores.add(batch, logits, computed, blocks)
    share, loss, metrics = scores.means(next(model.parameters()).device)
    return ExitPoint(threshold, share, loss, metrics)
