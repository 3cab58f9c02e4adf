"""Zeng et al. 2021 (YOSO): the weight is the probability that query and key collide under LSH, (1 - angle / pi) ^ tau.

o = B v / |B v| with, for unit q and k, E[B_ij] = (1 - arccos(q_i . k_j) / pi) ^ tau. B is estimated by `hashes` random
hash functions of tau hyperplanes: each adds the values to a table by the buckets of their keys, and a query reads its
own bucket, so the cost is linear in the length. The gradient of B_ij by q_i . k_j is the paper's lower bound of that of
its expectation, tau / 2 * B_ij, with the same hashes.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.dense import grouped_matmul, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import Init
from xscale.nn.random import SeededNumbers


@CORES.register(
    "yoso",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=True,
        cost="2 * T * S * K if hashes == 0 else hashes * (tau + 1) * (T + S) * K",
        context=("ulysses",),
        documents=True,
        decode=True,
    ),
    deviations=(
        "Causal models, which the paper does not have, use the expectation (YOSO-E), whose cost is quadratic.",
        "All heads and sequences of a batch have the same hyperplanes; evaluation draws them from a seed.",
    ),
)
class Yoso(Core):
    convolution: Parameter

    class Config(Core.Config):
        tau: PositiveInt = 8
        """Bits of a hash."""
        hashes: NonNegativeInt | None = None
        """m, hash functions of the estimate; 0: its expectation (YOSO-E), of quadratic cost; null: 32, and 0 in causal
        models."""
        gradient: Literal["lower_bound", "exact"] = "lower_bound"
        """lower_bound: the paper's, tau / 2 times the weight; exact: that of the expectation, which grows without bound
        as the angle goes to 0, so angles are bounded; for hashes = 0."""
        convolution: PositiveInt | None = None
        """Tokens of a depthwise convolution of the values, with one kernel for each head, that is added to the output;
        null: none."""
        seed: NonNegativeInt = 0
        """Seed of the hyperplanes; training draws new ones at every call."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.hashes = (0 if self.causal else 32) if config.hashes is None else config.hashes
        self.seed = config.seed + dims.layer
        if config.convolution is not None:
            start = Init(std=config.convolution**-0.5)
            self.declare("convolution", (heads, config.convolution), ("heads", "state"), start)

    @classmethod
    def check(cls, config: Config, dims: Any, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if config.hashes and dims.causal and not dims.cross:
            what = "hash tables sum all keys of a bucket, also later ones, and this model is causal"
            problems.append(
                Problem(f"{path}.hashes", what, "That is the expectation.", choices=take(0, None))
            )
        elif config.gradient == "exact" and (
            config.hashes or (config.hashes is None and not dims.causal)
        ):
            what = "an estimate by hashes has no exact gradient"
            problems.append(
                Problem(
                    f"{path}.gradient",
                    what,
                    choices=take("lower_bound") + take(0, key=f"{path}.hashes"),
                )
            )
        if config.convolution is not None and dims.cross:
            what = (
                "positions of two sequences are not comparable, so their values cannot be convolved"
            )
            problems.append(Problem(f"{path}.convolution", what, choices=take(None)))
        elif config.convolution is not None and config.convolution % 2 == 0:
            what = f"must be odd, got {config.convolution}"
            problems.append(
                Problem(f"{path}.convolution", what, choices=take(config.convolution + 1))
            )
        return problems

    @classmethod
    def example(cls) -> "Yoso.Config":
        """The expectation with its own gradient, which can be compared with differences."""
        return cls.Config(hashes=0, gradient="exact")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        unit_q, unit_k = F.normalize(upcast(q), dim=-1), F.normalize(upcast(k), dim=-1)
        weighted = self._estimate if self.hashes else self._expect
        out = F.normalize(weighted(unit_q, unit_k, upcast(v), mask), dim=-1)
        if self.config.convolution is not None:
            out = out + self._convolve(repeat_kv(upcast(v), q.shape[1]), mask)
        return out.to(v.dtype)

    def _expect(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """E[B] v, [B, H, T, K]."""
        cosine = grouped_matmul(q, k.mT)
        weights: Tensor
        if self.config.gradient == "exact":
            # The gradient of the angle is unbounded for parallel vectors.
            limit = 1 - 16 * torch.finfo(cosine.dtype).eps
            weights = (1 - cosine.clamp(-limit, limit).acos() / math.pi) ** self.config.tau
        else:
            weights = CollisionProbability.apply(cosine, self.config.tau)  # type: ignore[no-untyped-call]
        if mask.allowed is not None:
            weights = weights.masked_fill(~mask.allowed.to(q.device), 0.0)
        return grouped_matmul(weights, v)

    def _estimate(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """B v, [B, H, T, K], by hash tables."""
        assert not mask.causal
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        buckets = 2**self.config.tau
        hyperplanes = self.draw_hyperplanes(q.shape[-1]).to(q)
        codes = [_hash(x.detach(), hyperplanes) for x in (q, k)]  # [m, B, H, T]
        if mask.query_documents is not None:
            assert mask.key_documents is not None
            # Each document has buckets of its own.
            documents = (mask.query_documents, mask.key_documents)
            codes = [
                code + buckets * of[:, None] for code, of in zip(codes, documents, strict=True)
            ]
            buckets *= 1 + int(max(of.max() for of in documents))
        out: Tensor = HashedSum.apply(q, k, v, *codes, buckets, self.config.tau)  # type: ignore[no-untyped-call]
        return out

    def draw_hyperplanes(self, head_width: int) -> Tensor:
        """Normals of the hyperplanes, float64 [K, m, tau]."""
        numbers = SeededNumbers(int(self.random.integer(1 << 62)) if self.training else self.seed)
        return numbers.normal(head_width, self.hashes, self.config.tau)

    def _convolve(self, v: Tensor, mask: AttentionMask) -> Tensor:
        """Weighted sum of the values around each query, in causal models of those before it: -> [B, H, T, K]."""
        kernel = self.use(self.convolution).to(v.dtype)  # [H, W]
        size = kernel.shape[1]
        before = size - 1 if self.causal else size // 2
        if mask.key_documents is not None:
            documents = F.pad(mask.key_documents, (before, size - 1 - before), value=-1)
        padded = F.pad(v, (0, 0, before, size - 1 - before))
        out = torch.zeros_like(v)
        for shift in range(size):
            values = padded[:, :, shift : shift + v.shape[2]] * kernel[:, shift, None, None]
            if mask.key_documents is not None:
                same = documents[:, shift : shift + v.shape[2]] == mask.key_documents
                values = values * same[:, None, :, None]
            out = out + values
        return out[:, :, mask.offset :]

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        """Count the hyperplanes and the sums in tables, or the two products of the expectation."""
        if self.hashes:
            return float(
                heads * head_width * self.hashes * (self.config.tau + 1) * (queries + keys)
            )
        return 2.0 * heads * queries * keys * head_width


def _hash(x: Tensor, hyperplanes: Tensor) -> Tensor:
    """The bucket of each token by each hash function: [B, H, T, K] -> int64 [m, B, H, T]."""
    hashes, tau = hyperplanes.shape[1:]
    bits = (x @ hyperplanes.flatten(1)).view(*x.shape[:3], hashes, tau) > 0
    codes: Tensor = (bits * 2 ** torch.arange(tau, device=x.device)).sum(-1)
    return codes.movedim(-1, 0)


class CollisionProbability(torch.autograd.Function):
    """(1 - arccos(cosine) / pi) ^ tau; its gradient is the paper's lower bound, tau / 2 times the probability."""

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, tau: int) -> Tensor:
        probability: Tensor = (1 - cosine.clamp(-1, 1).acos() / math.pi) ** tau
        ctx.save_for_backward(probability)
        ctx.tau = tau
        return probability

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probability,) = ctx.saved_tensors
        return gradient * probability * (ctx.tau / 2), None


class HashedSum(torch.autograd.Function):
    """B v for B_ij = the fraction of the m hash functions by which query i and key j collide.

    q [B, H, T, K], k and v [B, H, S, K], codes int64 [m, B, H, T] and [m, B, H, S] below `buckets` -> [B, H, T, K]. The
    gradient of q and k is tau / 2 * B_ij by q_i . k_j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_codes: Tensor,
        key_codes: Tensor,
        buckets: int,
        tau: int,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, query_codes, key_codes)
        ctx.buckets, ctx.tau = buckets, tau
        return _mean_over_hashes(query_codes, key_codes, v, buckets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_codes, key_codes = ctx.saved_tensors
        buckets, scale = ctx.buckets, ctx.tau / 2
        if k.shape[2] <= _DENSE_KEYS:
            collisions = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype, device=q.device)
            for queries, keys in zip(query_codes, key_codes, strict=True):
                collisions += queries[..., :, None] == keys[..., None, :]
            collisions /= len(query_codes)
            slopes = scale * collisions * (gradient @ v.mT)  # [B, H, T, S]
            return slopes @ k, slopes.mT @ q, collisions.mT @ gradient, None, None, None, None
        dv = _mean_over_hashes(key_codes, query_codes, gradient, buckets)
        # dq_i = tau / 2 * (sum_j B_ij k_j v_j^T) g_i, and the same with the roles exchanged.
        dq = scale * _weighted(query_codes, key_codes, gradient, v, k, buckets)
        dk = scale * _weighted(key_codes, query_codes, v, gradient, q, buckets)
        return dq, dk, dv, None, None, None, None


_DENSE_KEYS = 1024
"""Keys up to which the backward computes all pairs, which is faster than tables of K x K numbers in each bucket."""
_CHANNELS = 8
"""Channels of the weighted sums whose tables are made at once."""


def _weighted(
    read: Tensor, written: Tensor, left: Tensor, right: Tensor, x: Tensor, buckets: int
) -> Tensor:
    """sum_j B_ij (left_i . right_j) x_j: [B, H, T, K]; tables of products keep it linear in the length."""
    channels = []
    for first in range(0, x.shape[-1], _CHANNELS):
        products = right[..., None] * x[..., None, first : first + _CHANNELS]  # [B, H, S, K, C]
        sums = _mean_over_hashes(read, written, products.flatten(3), buckets)
        sums = sums.view(*sums.shape[:3], *products.shape[3:])  # [B, H, T, K, C]
        channels.append((left[..., None, :] @ sums)[..., 0, :])  # [B, H, T, C]
    return torch.cat(channels, -1)


def _mean_over_hashes(read: Tensor, written: Tensor, x: Tensor, buckets: int) -> Tensor:
    """Sum x [B, H, S, P] in tables by the codes `written`, and read them by the codes `read`: -> [B, H, T, P]."""
    batch, heads, _, width = x.shape
    first = buckets * torch.arange(batch * heads, device=x.device).view(batch, heads, 1)
    out = x.new_zeros(batch, heads, read.shape[-1], width)
    for queries, keys in zip(read, written, strict=True):
        table = x.new_zeros(batch * heads * buckets, width)
        table.index_add_(0, (keys + first).flatten(), x.reshape(-1, width))
        out += table[queries + first]
    return out / len(read)
