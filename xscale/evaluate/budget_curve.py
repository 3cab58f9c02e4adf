"""Quality against compute: evaluations of a model with gates at each budget it was trained for (Bapna et al. 2020)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xscale.evaluate.logit_scores import LogitScores
from xscale.nn.depth.gates import BUDGETS, GateBudget
from xscale.nn.forward import Stats
from xscale.nn.tokens import Tokens
from xscale.objective.objective import Batch


@dataclass(frozen=True)
class BudgetPoint:
    """One budget."""

    budget: float
    computed: float
    """Fraction of the sublayers that a token is computed in, in the mean over all tokens and stacks."""
    loss: float
    """Mean over the targets, in nats; of scores the mean squared error."""
    metrics: dict[str, float]
    """The accuracy; of an objective on labels all of its metrics."""


def gate_budgets(model: nn.Module) -> list[GateBudget]:
    """Return the budgets of the model's stacks; empty: it has no gates."""
    return [module for module in model.modules() if isinstance(module, GateBudget)]


def budget_curve(
    model: nn.Module,
    batches: Callable[[], Iterable[tuple[Batch, bool]]],
    new_scores: Callable[[], LogitScores],
) -> list[BudgetPoint]:
    """Evaluate a model with gates at each budget, in ascending order. Collective over all ranks.

    `batches` returns the micro-batches of one evaluation, with a flag that is false for those that do not count, and
    `new_scores` what scores them.
    """
    model.eval()
    budgets = sorted({budget for stack in gate_budgets(model) for budget in stack.config.budgets})
    return [_point(model, batches(), budget, new_scores()) for budget in budgets]


@torch.no_grad()
def _point(
    model: nn.Module, batches: Iterable[tuple[Batch, bool]], budget: float, scores: LogitScores
) -> BudgetPoint:
    for batch, counts in batches:
        stats = Stats()
        source = None if batch.source is None else _at_budget(model, batch.source, budget, stats)
        logits: Any = model(_at_budget(model, batch.tokens, budget, stats), None, source)
        if not counts:
            continue
        shares = [
            float(mean) for name, mean in stats.means().items() if name.endswith(".gates/computed")
        ]
        rows = len(batch.tokens.ids)
        scores.add(batch, logits, rows * sum(shares) / len(shares), float(rows))
    share, loss, metrics = scores.means(next(model.parameters()).device)
    return BudgetPoint(budget, share, loss, metrics)


def _at_budget(model: nn.Module, tokens: Tokens, budget: float, stats: Stats) -> Tokens:
    """Return the tokens with that budget for all sequences."""
    index = gate_budgets(model)[0].config.budgets.index(budget)
    budgets = torch.full((len(tokens.ids),), index, device=tokens.ids.device)
    return tokens.with_forward(stats=stats).with_signals({BUDGETS: budgets})
