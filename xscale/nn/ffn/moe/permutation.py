"""Permutation sorts assignments by expert and drops those over an expert's capacity; nothing else does either.

`Dispatch`, the seam of expert parallelism, carries the sorted rows to the experts and back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.ffn.moe.segments import Segments
from xscale.nn.forward import Choices
from xscale_kernels.torch_private import calls_directly

DropPolicy = Literal["position", "choice", "probability", "priority"]
"""Which assignments an overfull expert keeps."""


@dataclass(frozen=True)
class DispatchPlan:
    """The rows that go to the experts, sorted by expert.

    With fixed shapes M counts the dropped assignments too: their rows come last, with weight 0, and no expert counts
    them.
    """

    tokens: Tensor
    """[M] int64: the token each row is a copy of."""
    weights: Tensor
    """[M]: factor of each row's output in the combine step."""
    tokens_per_expert: Tensor
    """[E] int64: rows of each expert."""
    load: Tensor
    """[E] int64: assignments of each expert before any was dropped."""
    dropout_keys: Tensor | None = None
    """[M] int64: seeds of the rows' dropout in the experts, which travel with them; None: no dropout."""
    token_rows: Tensor | None = None
    """[N, k] int64: the rows of each token, where all have k of them; None: to be sorted for."""


def _inverse(permutation: Tensor) -> Tensor:
    """The inverse of a permutation [M], without sorting."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


def plan_dispatch(
    routing: Routing,
    experts: int,
    capacity: int | list[int] | None,
    drop_policy: DropPolicy,
    segments: Segments | None = None,
    *,
    fixed_shapes: bool = False,
    choices: Choices | None = None,
) -> DispatchPlan:
    """Sort the assignments by expert; each expert keeps at most `capacity` of each segment of the tokens.

    `capacity` is one number for all segments, or one for each; None: no limit. `segments` None: all tokens are one.
    A recomputation finds in `choices` which assignments its forward preferred.

    Where nothing is dropped, or with `fixed_shapes`, the host does not wait for the device.
    """
    tokens = routing.probabilities.shape[0]
    order = None if capacity is None else _precedence(routing, drop_policy)
    if order is not None and choices is not None:
        order = choices.make_or_repeat(order)
    expert, token = routing.expert, routing.token
    groups = 1 if segments is None else segments.count
    key = (
        expert if segments is None or segments.is_one else expert * groups + segments.of(token)
    )  # [M]
    bins = experts * groups
    if routing.kept is not None:
        key = torch.where(routing.kept, key, bins)
    sorted_key, sorting = (key if order is None else key[order]).sort(stable=True)
    order = sorting if order is None else order[sorting]
    starts = torch.searchsorted(
        sorted_key, torch.arange(bins + 1, device=sorted_key.device)
    )  # [bins + 1]
    load = counts = starts.diff()
    kept = None
    if capacity is not None:
        slot = torch.arange(len(sorted_key), device=sorted_key.device) - starts[sorted_key]
        if isinstance(capacity, int):
            kept = (slot < capacity) & (sorted_key < bins)
            counts = load.clamp(max=capacity)
        else:
            limits = torch.tensor(capacity, device=slot.device)  # [segments]
            kept = (slot < limits[sorted_key % groups]) & (sorted_key < bins)
            counts = load.minimum(limits.repeat(experts))
    elif routing.kept is not None:
        kept = sorted_key < bins
    if kept is not None and not fixed_shapes:
        order, kept = order[kept], None
    if kept is not None:
        dropped_last = kept.logical_not().to(torch.uint8).argsort(stable=True)
        order, kept = order[dropped_last], kept[dropped_last]
    token_rows = None
    if fixed_shapes and routing.all_tokens:
        token_rows = _inverse(order).view(routing.k, tokens).t().contiguous()
    weights = routing.weight[order]
    return DispatchPlan(
        tokens=token[order],
        weights=weights if kept is None else weights.where(kept, 0),
        tokens_per_expert=counts if groups == 1 else counts.view(experts, groups).sum(1),
        load=load if groups == 1 else load.view(experts, groups).sum(1),
        token_rows=token_rows,
    )


def experts_of_rows(tokens_per_expert: Tensor, rows: int) -> Tensor:
    """The expert [M] of each of M rows sorted by expert, for counts [E]; the last expert for rows that none counts."""
    ends = tokens_per_expert.cumsum(0)
    row = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)


def _precedence(routing: Routing, drop_policy: DropPolicy) -> Tensor | None:
    """Assignments [M] in the order in which they fill an expert's capacity; None: in the given order."""
    if drop_policy == "choice" or (drop_policy == "position" and routing.k == 1):
        return None
    if drop_policy == "position":
        return routing.token.argsort(stable=True)
    if drop_policy == "probability":
        return routing.weight.detach().argsort(descending=True, stable=True)
    best = routing.probabilities.detach().amax(1)[routing.token]  # [M]
    # Each block of equal choices is sorted by itself, so that no second choice displaces a first one.
    order = best.view(routing.k, -1).argsort(dim=1, descending=True, stable=True)
    first = torch.arange(routing.k, device=order.device) * order.shape[1]
    return (order + first[:, None]).reshape(-1)


ExpertsCall = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The experts of this rank: (rows [M, D] sorted by expert, tokens_per_expert [local experts], dropout_keys [M] or None)
-> [M, D]."""


class Dispatch(Protocol):
    """Interface of `Moe.dispatch`; expert parallelism substitutes `AllToAll` for `LocalDispatch`."""

    def __call__(
        self,
        rows: Tensor,
        tokens_per_expert: Tensor,
        experts: ExpertsCall,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Outputs [M, D] of rows [M, D] sorted by expert, in the same order.

        `tokens_per_expert` [E] counts over *all* experts; `experts` takes rows of the local ones only, with their
        `dropout_keys` [M]. There may be more rows than they sum to: the outputs of those at the end have any finite
        values.
        """
        ...


class LocalDispatch:
    """Dispatch with all experts on this rank."""

    def __call__(
        self,
        rows: Tensor,
        tokens_per_expert: Tensor,
        experts: ExpertsCall,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        if calls_directly(rows) and len(rows) == int(tokens_per_expert.sum()):
            return experts(rows, tokens_per_expert, dropout_keys)
        # The last expert takes the rows that none counts, if there are any: on a GPU the host does not know.
        dropped = len(rows) - tokens_per_expert.sum()
        last = F.pad(dropped.view(1), (len(tokens_per_expert) - 1, 0))
        return experts(rows, tokens_per_expert + last, dropout_keys)
