"""Zhou et al. 2021 (Informer), ProbSparse attention: only the top queries by a sparsity measure attend.

M(q) = max_j q . k_j - (1/S) sum_j q . k_j over a sample of c ln S keys, drawn for each query; the top c ln T queries
attend to all keys, every other query gets the mean of the values.

Masked (causal): every other query gets the sum of the values so far. The paper takes the top c ln T queries of the
whole sequence, so that later tokens decide whether a query attends. Here the query at place t attends if it is among
the top c ln t of the first t queries, by keys that are sampled among the first t: with random scores about
(c / 2) (ln T)^2 of T queries attend. The distilling between blocks is the method `distill` of `stack.pooling`.
"""

import math

import torch
from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import dense_attention, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.random import SeededNumbers

_ROWS = 128
"""Queries for which sampled keys are gathered at once."""


@CORES.register(
    "informer",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="3 * T * min(T, factor * ceil(log(T))) * K",
        context=("ulysses",),
        dropout=True,
    ),
    deviations=(
        "Masked: a query attends if it is among the top queries so far; the paper chooses from the whole sequence, so "
        "that later tokens decide.",
    ),
)
class Informer(Core):
    class Config(Core.Config):
        factor: PositiveInt = 5
        """c, sampling factor: c ln T queries attend, and c ln S keys are sampled for each query; logarithms are rounded
        up."""
        seed: NonNegativeInt = 0
        """Seed of the sampled keys; training samples new keys at every call."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.seed = config.seed + dims.layer

    @property
    def counts_keys(self) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        sparsity = self._sparsity(upcast(q.detach()), upcast(k.detach()), mask.causal)
        if mask.causal:
            return self._masked(q, k, v, sparsity, mask)
        active = (
            sparsity.topk(self._count(mask.queries), -1)
            .indices[..., None]
            .expand(-1, -1, -1, q.shape[-1])
        )
        attended = dense_attention(
            q.gather(2, active), k, v, None, lambda weights: self.drop_weights(weights, mask)
        )
        return v.mean(2, keepdim=True).expand_as(q).scatter(2, active, attended)

    def _masked(
        self, q: Tensor, k: Tensor, v: Tensor, sparsity: Tensor, mask: AttentionMask
    ) -> Tensor:
        assert mask.queries == mask.keys
        leads = self._leads(sparsity)  # [B, H, T]
        # With dropout all queries are computed, so that a draw has the same shape whatever the tokens and heads are.
        drops = self.training and mask.dropout > 0
        rows = mask.queries if drops else int(leads.sum(-1).max())
        leading = leads.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[
            ..., :rows, None
        ]  # [B, H, R, 1]
        index = leading.expand(-1, -1, -1, q.shape[-1])
        later = torch.arange(mask.keys, device=q.device) > leading  # [B, H, R, S]
        attended = dense_attention(
            q.gather(2, index), k, v, later, lambda weights: self.drop_weights(weights, mask)
        )
        sums = upcast(v).cumsum(2).to(v.dtype)
        attends = leads[..., None].gather(2, leading)
        return sums.scatter(2, index, torch.where(attends, attended, sums.gather(2, index)))

    def _leads(self, sparsity: Tensor) -> Tensor:
        """Whether each query is among the top queries so far, by M [B, H, T]: bool [B, H, T]."""
        length = sparsity.shape[2]
        limits = torch.tensor(
            [self._count(position + 1) for position in range(length)], device=sparsity.device
        )
        places = torch.arange(length, device=sparsity.device)
        leads = []
        for start in range(0, length, _ROWS):
            rows = slice(start, start + _ROWS)
            higher = (
                sparsity[:, :, None, : start + _ROWS] >= sparsity[:, :, rows, None]
            )  # [B, H, R, S]
            earlier = places[: start + _ROWS] < places[rows, None]
            leads.append((higher & earlier).sum(-1) < limits[rows])
        return torch.cat(leads, 2)

    def _sparsity(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        """M of each query, [B, H, T], over the keys sampled for it."""
        sample = self.sample_keys(q.shape[2], k.shape[2], causal).to(q.device)
        seen = torch.arange(1, q.shape[2] + 1, device=q.device) if causal else k.shape[2]
        sums, highest = [], []
        for start in range(0, q.shape[2], _ROWS):
            sampled = k[:, :, sample[start : start + _ROWS]]  # [B, H, R, U, K]
            scores = (sampled @ q[:, :, start : start + _ROWS, :, None])[..., 0]  # [B, H, R, U]
            sums.append(scores.sum(-1))
            highest.append(scores.amax(-1))
        return torch.cat(highest, 2) - torch.cat(sums, 2) / seen

    def sample_keys(self, queries: int, keys: int, causal: bool = False) -> Tensor:
        """Draw the indices of U keys for each query, with replacement, the same in all heads: int64 [T, U].

        Causal: among the keys up to the query.
        """
        numbers = SeededNumbers(int(self.random.integer(1 << 62)) if self.training else self.seed)
        if causal:
            return (
                numbers.integers(1 << 40, queries, self._count(keys))
                % torch.arange(1, queries + 1)[:, None]
            )
        return numbers.integers(keys, queries, self._count(keys))

    def _count(self, length: int) -> int:
        return int(min(length, self.config.factor * math.ceil(math.log(max(2, length)))))

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        # With random scores the query at place t is among the top u of the first t with probability u / t.
        rows = self._count(queries)
        if self.causal:
            rows = round(
                sum(self._count(position) / position for position in range(1, queries + 1))
            )
        sparsity, active = queries * self._count(keys), 2 * rows * keys
        return float(heads * head_width * (sparsity + active))
