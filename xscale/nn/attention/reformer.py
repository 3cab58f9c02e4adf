"""Kitaev et al. 2020 (Reformer), LSH attention: a token sees tokens whose keys hash to the same bucket.

h(x) = argmax [x R, -x R] with R random; scores q . k / |k|; a token attends to itself only if it has no other key. The
paper shares queries and keys, and so does the mixer unless its `shared_qk` is false; a token is hashed by its key.
`ops/bucketed.py` says which tokens of its bucket a token sees, and has the paper's chunks too.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.bucketed import bucketed_attention, chunked_hash_attention
from xscale.nn.attention.ops.chunks import pad_queries_to_keys
from xscale.nn.attention.ops.dense import repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.random import SeededNumbers


@CORES.register(
    "reformer",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="hashes * T * (6 * chunk_length + buckets // 2) * K",
        context=("ulysses",),
        documents=True,
        decode=True,
    ),
    deviations=(
        "With scope 'chunk' a key that several rounds show is counted once in each; the paper divides by their number.",
        "With scope 'bucket' a token sees the nearest tokens of its bucket. The paper sorts tokens by bucket and lets "
        "a token see its chunk and the previous one, whose boundaries depend on later tokens: scope 'chunk', for "
        "bidirectional models.",
        "Reversible layers are not part of the core: block.residual=reversible.",
    ),
)
class Reformer(Core):
    class Config(Core.Config):
        renamed = {"reach": "chunk_length", "rounds": "hashes"}

        buckets: int = Field(default=32, ge=2, multiple_of=2)
        """Hash buckets of a round, an even number. The paper: 2 * length / chunk_length."""
        chunk_length: PositiveInt = 64
        """Tokens of a chunk; with scope 'bucket', tokens of its bucket that a token sees on each side (causal: before
        it), itself included."""
        hashes: PositiveInt = 2
        """Rounds of hashing; a token sees its buckets of all rounds."""
        scope: Literal["bucket", "chunk"] = "bucket"
        """bucket: a token sees the nearest tokens of its bucket; chunk: as in the paper, tokens are sorted by bucket,
        and a token sees its chunk and the previous one. Later tokens move chunk boundaries, so it is bidirectional
        only."""
        redraw: bool = True
        """Whether training draws new hashes at every call, as the paper does; evaluation has fixed hashes."""
        seed: NonNegativeInt = 0
        """Seed of the hashes."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.seed = config.seed + dims.layer

    @classmethod
    def shares_qk(cls, config: Config) -> bool:
        return True

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        if config.scope != "chunk" or dims is None or not dims.causal or dims.cross:
            return []
        what = "chunk boundaries depend on later tokens, so scope 'chunk' is not causal"
        return [Problem(f"{path}.scope", what, choices=take("bucket"))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        q, k = pad_queries_to_keys(upcast(q), mask), upcast(k)
        labels = self.hash(k)  # [R, B, G, S]
        labels = labels.repeat_interleave(q.shape[1] // k.shape[1], 2)
        k, values = repeat_kv(F.normalize(k, dim=-1), q.shape[1]), repeat_kv(upcast(v), q.shape[1])
        if self.config.scope == "chunk":
            return chunked_hash_attention(q, k, values, labels, self.config.chunk_length, mask).to(
                v.dtype
            )
        out = bucketed_attention(
            q, k, values, labels, self.config.chunk_length, mask, avoid_self=True
        )
        return out[:, :, mask.offset :].to(v.dtype)

    def hash(self, x: Tensor) -> Tensor:
        """Hash keys [B, G, S, K] -> buckets [R, B, G, S]; all heads share the random rotations."""
        fresh = self.training and self.config.redraw
        numbers = SeededNumbers(int(self.random.integer(1 << 62)) if fresh else self.seed)
        rotations = numbers.normal(x.shape[-1], self.config.hashes * self.config.buckets // 2).to(x)
        rotated = x.detach() @ rotations
        rotated = rotated.view(*x.shape[:3], self.config.hashes, -1)
        return torch.cat((rotated, -rotated), -1).argmax(-1).movedim(-1, 0)

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        reach, rounds = self.config.chunk_length, self.config.hashes
        reach = min(reach, keys) if self.config.scope == "chunk" else reach
        neighbours = 1 if reach == keys and self.config.scope == "chunk" else 2
        seen = (
            (neighbours if self.causal or self.config.scope == "chunk" else 3)
            * reach
            * (-(-keys // reach) * reach)
        )
        return float(heads * rounds * head_width * (2 * seen + keys * self.config.buckets // 2))
