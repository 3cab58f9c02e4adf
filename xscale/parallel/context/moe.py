"""Mixtures over sharded sequences: every rank routes the gathered micro-batch, then keeps the rows of its own tokens.

Capacity, dropped tokens, auxiliary losses, capacity groups and noise are functions of all tokens in their order, so the
layer's input is all-gathered for the router. Rows are dispatched to experts from the ranks that have their tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xscale.nn.ffn.moe.permutation import DispatchPlan, experts_of_rows
from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import TokenShard


def local_rows(plan: DispatchPlan, tokens: TokenShard) -> DispatchPlan:
    """The plan's rows whose tokens are on this rank, numbered by their position in its shard."""
    sharding, length = tokens.sharding, tokens.length
    positions = sharding.positions(length, plan.tokens.device)[sharding.rank]  # [P]
    shard_index = positions.new_full(
        (length + 2 * sharding.count * sharding.chunk_length(length),), -1
    )
    shard_index[positions] = torch.arange(len(positions), device=positions.device)
    index = shard_index[plan.tokens % length]
    is_local = index >= 0
    rows = plan.tokens.div(length, rounding_mode="floor") * len(positions) + index
    # Rows at the end that no expert counts are of dropped assignments.
    is_local = is_local & (
        torch.arange(len(index), device=index.device) < plan.tokens_per_expert.sum()
    )
    experts = experts_of_rows(plan.tokens_per_expert, len(plan.tokens))
    tokens_per_expert = torch.bincount(experts[is_local], minlength=len(plan.tokens_per_expert))
    keys = None if plan.dropout_keys is None else plan.dropout_keys[is_local]
    return DispatchPlan(rows[is_local], plan.weights[is_local], tokens_per_expert, plan.load, keys)


@dataclass(frozen=True)
class GlobalRouting:
    """Substitute for a mixture's `dispatch_plan` that routes the gathered sequence."""

    inner: Callable[[Tensor, Tokens], tuple[DispatchPlan, Tensor | None]]
    """Routes an unsharded sequence."""
    select_rows: Callable[[DispatchPlan, TokenShard], DispatchPlan] = local_rows
    """From the plan of all tokens to that of this rank's tokens."""

    def __call__(self, x: Tensor, tokens: Tokens) -> tuple[DispatchPlan, Tensor | None]:
        """The plan of this rank's shard x [B, P, D], and its fraction of the loss that every rank computes in full."""
        if not isinstance(tokens, TokenShard):
            return self.inner(x, tokens)
        full = replace(tokens.full, forward=tokens.forward)
        plan, aux_loss = self.inner(tokens.sharding.gather(x, tokens.length), full)
        return self.select_rows(
            plan, tokens
        ), None if aux_loss is None else aux_loss / tokens.sharding.count
