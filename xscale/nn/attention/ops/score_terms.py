"""Terms that are added to attention scores, as tables that a function of one score indexes, for FlexAttention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.nn.attention.ops.dense import grouped_matmul, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.position.distance_tables import DistanceTables

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Score, batch, head, query and key, each a number -> the new score: FlexAttention's `score_mod`."""


@dataclass(frozen=True)
class ScoreTerms:
    """Soft cap of the score of each query and key, and terms that are added to it after that.

    Their columns n are N distances key - query that ascend from `first`; nearer and farther ones have the first and the
    last column. Tables are in float32 at least: many scores add to the gradient of one number.
    """

    soft_cap: Tensor | None = None
    """[H], scores become cap * tanh(score / cap). A tensor, as torch.compile does not trace a float that changes from
    one call to the next."""
    first: int = 0
    by_distance: Tensor | None = None
    """[H or 1, N]."""
    by_query: Tensor | None = None
    """[B, H, T, N], terms of each query with each distance."""
    by_key: Tensor | None = None
    """[B, H, T], terms of each key."""
    by_key_distance: Tensor | None = None
    """[B, H, T, N], terms of each key with each distance."""
    by_pair: Tensor | None = None
    """[B or 1, H or 1, T, T]."""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, mask: AttentionMask, soft_cap: float | None = None
    ) -> "ScoreTerms":
        """Compute the terms of q [B, H, T, K] and k [B, G, T, K]: those of `mask`, whose position adds no values."""
        heads = q.shape[1]
        scale = q.shape[-1] ** -0.5
        terms = mask.position_terms
        dtype = torch.promote_types(q.dtype, torch.float32)
        cap = (
            None
            if soft_cap is None
            else torch.full((heads,), soft_cap, dtype=dtype, device=q.device)
        )
        if mask.relative_bias is None and terms is None:
            return cls(cap, by_pair=mask.bias)
        reach = mask.bias_reach if terms is None else terms.position.reach
        first, last = 1 - mask.keys, 0 if mask.causal else mask.keys - 1
        if reach is not None:
            first, last = max(first, -reach), min(last, reach)
        distances = torch.arange(first, last + 1, device=q.device)
        if mask.relative_bias is not None:
            tables = DistanceTables(bias=mask.relative_bias(distances))
        else:
            tables_of = None if terms is None else terms.tables(q)
            assert tables_of is not None, "terms that are not by distance"
            tables = tables_of(distances)
        assert tables.value_rows is None, "terms of the values"
        by_distance = None if tables.bias is None else upcast(tables.bias)
        by_query = by_key = by_key_distance = None
        if tables.query_rows is not None:
            queries = (
                q if tables.position_bias is None else q + tables.position_bias[:, None].to(q.dtype)
            )
            by_query = upcast(queries * scale @ tables.query_rows.mT.to(q.dtype))
        if tables.content_bias is not None:
            content = (tables.content_bias.to(q.dtype) * scale).expand(
                len(q), heads, -1
            )  # [B, H, K]
            by_key = upcast(grouped_matmul(content[:, :, None], k.mT)[:, :, 0])
        if tables.key_rows is not None:
            by_key_distance = upcast(repeat_kv(k, heads) * scale @ tables.key_rows.mT.to(k.dtype))
        return cls(cap, first, by_distance, by_query, by_key, by_key_distance, mask.bias)

    def score_mod(self, length: int) -> ScoreMod | None:
        """Return FlexAttention's `score_mod` of these terms over `length` tokens; None: it would change no score.

        The fused kernels index also for scores that the mask hides, so every index is clamped to its table. Each table
        is indexed once, as their gradients demand.
        """
        tables = (self.by_distance, self.by_query, self.by_key, self.by_key_distance, self.by_pair)
        soft_cap = self.soft_cap
        if soft_cap is None and all(table is None for table in tables):
            return None
        # Compiled, a view that score_mod reads would silently get no gradient.
        by_distance, by_query, by_key, by_key_distance, by_pair = (
            table.clone() if table is not None and table.requires_grad else table
            for table in tables
        )
        first, end = self.first, length - 1
        columns = next(
            (x.shape[-1] for x in (by_distance, by_query, by_key_distance) if x is not None), 1
        )

        def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if soft_cap is not None:
                cap = soft_cap[h]
                score = cap * torch.tanh(score / cap)
            n = (j - i - first).clamp(0, columns - 1)
            i, j = i.clamp(max=end), j.clamp(max=end)
            if by_distance is not None:
                score = score + by_distance[h * 0 if by_distance.shape[0] == 1 else h, n]
            if by_query is not None:
                score = score + by_query[b, h, i, n]
            if by_key is not None:
                score = score + by_key[b, h, j]
            if by_key_distance is not None:
                score = score + by_key_distance[b, h, j, n]
            if by_pair is not None:
                batch = b * 0 if by_pair.shape[0] == 1 else b
                score = score + by_pair[batch, h * 0 if by_pair.shape[1] == 1 else h, i, j]
            return score

        return modified
