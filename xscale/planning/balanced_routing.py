"""Balanced routing: the steps of a mixture whose sizes depend on the router's numbers, by even loads in their place.

With an overload factor this rank is the busiest of the expert-parallel ones, and the others send it more rows.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.permutation import DispatchPlan, ExpertsCall
from xscale.nn.module import substitute
from xscale.parallel.context.moe import GlobalRouting
from xscale.parallel.context.sequence_sharding import TokenShard
from xscale.parallel.deepep import ExpertsByDeepEp
from xscale.parallel.expert import AllToAll, SplitRowsOverTp


class BalancedAllToAll(AllToAll):
    """All-to-all of equally many rows to each rank and `overload` times as many from each, whatever the counts are."""

    def __init__(self, group: Any, overload: float) -> None:
        super().__init__(group)
        self.overload = overload

    def __call__(
        self,
        rows: Tensor,
        tokens_per_expert: Tensor,
        experts: ExpertsCall,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        self.rows = len(rows)
        return super().__call__(rows, tokens_per_expert, experts, dropout_keys)

    def split_sizes(self, send: Tensor, receive: Tensor) -> tuple[list[int], list[int]]:
        return _split(self.rows, len(send)), _split(round(self.rows * self.overload), len(send))


def _split(rows: int, ranks: int) -> list[int]:
    """Rows of each rank, as equal as can be."""
    ends = [rows * rank // ranks for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(ends)]


def balance_routing(model: nn.Module, overload: float = 1.0) -> None:
    """Substitute, in each mixture, the steps whose sizes depend on the router's numbers.

    This rank's experts get `overload` times the mean rows of a rank, or what their capacity admits if that is less.
    """
    for module in model.modules():
        if not isinstance(module, Moe):
            continue
        if "assign" in module.router.seams:
            substitute(module.router, "assign", _in_turn)
        if "counted" in module.router.seams:
            substitute(module.router, "counted", lambda row: row)
        dispatch = module.dispatch
        capacity = module.config.capacity_factor
        factor = overload if capacity is None else min(overload, max(capacity, 1.0))
        plan = module.dispatch_plan
        apply_experts = module.apply_experts
        if isinstance(apply_experts, ExpertsByDeepEp):
            # Its kernels take no tensors without numbers, so the step is that of the all-to-all.
            substitute(module, "apply_experts", apply_experts.inner)
        if isinstance(dispatch, SplitRowsOverTp) and isinstance(dispatch.dispatch, AllToAll):
            balanced = BalancedAllToAll(dispatch.dispatch.group, factor)
            substitute(module, "dispatch", SplitRowsOverTp(balanced, dispatch.group))
        elif isinstance(dispatch, AllToAll):
            substitute(module, "dispatch", BalancedAllToAll(dispatch.group, factor))
        if isinstance(plan, GlobalRouting):
            substitute(module, "dispatch_plan", replace(plan, select_rows=_first_rows))


def _in_turn(logits: Tensor) -> Tensor:
    """Assign tokens to experts in turn: [N], from logits [N, E]."""
    return torch.arange(len(logits), device=logits.device) % logits.shape[1]


def _first_rows(plan: DispatchPlan, tokens: TokenShard) -> DispatchPlan:
    """Return the first rows of the plan of all tokens: as many as this rank has under a balanced load."""
    rows = -(-len(plan.tokens) // tokens.sharding.count)
    # A copy, as the real selection is.
    index = torch.arange(rows, device=plan.tokens.device)
    keys = None if plan.dropout_keys is None else plan.dropout_keys[index]
    return DispatchPlan(
        plan.tokens[index], plan.weights[index], plan.tokens_per_expert, plan.load, keys
    )
