"""Layout-invariant random numbers: a rank draws those of the global tensor and takes its slice, as one process draws.

Substitutes for `Module.random` (see `xscale.nn.random`), one for each way in which activations are sharded; that of
context parallelism is in `xscale.parallel.context.sequence_sharding`. A
substitute wraps the one before it, so that sequence parallelism in a shard of the sequence slices twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xscale.nn.axes import Axis
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import substitute
from xscale.nn.random import RandomNumbers
from xscale.nn.tokens import Tokens
from xscale.parallel.shard.region import TensorRegion


class ShardedRandomNumbers(RandomNumbers):
    """Draws of a module whose tensors are sharded along `axis`."""

    axis: Axis

    def __init__(self, inner: RandomNumbers) -> None:
        self.inner = inner

    def global_size(self, local: int, tokens: Tokens | None) -> int:
        """Size of the axis over all ranks, where `local` elements of it are on this one."""
        raise NotImplementedError

    def full_tokens(self, tokens: Tokens | None) -> Tokens | None:
        """Tokens of the tensor that is drawn."""
        return tokens

    def shard(self, full: Tensor, dim: int, local: int, tokens: Tokens | None) -> Tensor:
        """Slice this rank's `local` elements of a global tensor along `dim`."""
        return full.narrow(dim, self.offset(self.axis), local)

    def draw(
        self,
        make: Callable[[tuple[int, ...]], Tensor],
        shape: tuple[int, ...],
        dims: tuple[Axis, ...],
        tokens: Tokens | None = None,
    ) -> Tensor:
        assert len(shape) == len(dims), f"{len(shape)} sizes, {len(dims)} dims"
        if self.axis not in dims:
            return self.inner.draw(make, shape, dims, tokens)
        dim = dims.index(self.axis)
        size = self.global_size(shape[dim], tokens)
        if size == shape[dim]:
            return self.inner.draw(make, shape, dims, tokens)
        full = self.inner.draw(
            make, (*shape[:dim], size, *shape[dim + 1 :]), dims, self.full_tokens(tokens)
        )
        return self.shard(full, dim, shape[dim], tokens)

    def offset(self, dim: Axis) -> int:
        return self.inner.offset(dim)

    def dropout(
        self, x: Tensor, p: float, dims: tuple[Axis, ...], tokens: Tokens | None = None
    ) -> Tensor:
        if not p:
            return x
        if self.axis not in dims:
            return self.inner.dropout(x, p, dims, tokens)
        plain = RandomNumbers()
        return x * self.draw(
            lambda size: plain.dropout(x.new_ones(size), p, dims), tuple(x.shape), dims, tokens
        )

    def attention(self, *arguments: Any, **masks: Any) -> Tensor:
        return self.inner.attention(*arguments, **masks)

    def dropout_add(
        self,
        x: Tensor,
        residual: Tensor,
        p: float,
        tokens: Tokens,
        implementation: str | None = None,
    ) -> Tensor:
        plain = RandomNumbers()
        if not p:
            return plain.dropout_add(x, residual, p, tokens, implementation)

        def mask(shape: tuple[int, ...]) -> Tensor:
            return plain.dropout_add(
                x.new_ones(shape), x.new_zeros(shape), p, tokens, implementation
            )

        return residual + x * self.draw(mask, tuple(x.shape), ("batch", "tokens", "width"), tokens)


class TokensOverTensor(ShardedRandomNumbers):
    """Draws between the regions of sequence parallelism, where the sequence is sharded over tp."""

    axis = "tokens"

    def __init__(self, inner: RandomNumbers, region: TensorRegion) -> None:
        super().__init__(inner)
        self.region = region

    def global_size(self, local: int, tokens: Tokens | None) -> int:
        assert tokens is not None, "a draw over the sequence needs its tokens"
        return tokens.ids.shape[1]

    def shard(self, full: Tensor, dim: int, local: int, tokens: Tokens | None) -> Tensor:
        assert dim == 1, "a sequence is the second dim of [B, T, ...]"
        return self.region.shard(full)


class HiddenOverTensor(ShardedRandomNumbers):
    """Draws over a hidden layer that is sharded over tp."""

    axis = "ffn"

    def __init__(self, inner: RandomNumbers, first: int, hidden: int) -> None:
        super().__init__(inner)
        self.first, self.hidden = first, hidden

    def global_size(self, local: int, tokens: Tokens | None) -> int:
        return self.hidden

    def offset(self, dim: Axis) -> int:
        return self.first if dim == "ffn" else self.inner.offset(dim)


class HeadsOfCore(ShardedRandomNumbers):
    """Draws of an attention core, or of a mixer without one, whose heads are sharded, over tp, cp (Ulysses) or both:
    `first_head` says which."""

    axis = "heads"

    def __init__(self, inner: RandomNumbers, core: Any, heads: int) -> None:
        super().__init__(inner)
        self.core, self.heads = core, heads

    def global_size(self, local: int, tokens: Tokens | None) -> int:
        return self.heads

    def offset(self, dim: Axis) -> int:
        return self.core.first_head if dim == "heads" else self.inner.offset(dim)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        p: float,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not p or q.shape[1] == self.heads:
            return super().attention(q, k, v, p, attn_mask=attn_mask, is_causal=is_causal)
        if q.is_cuda:
            # A fused kernel draws its own mask on every layout; ranks need different seeds, and the random stream that
            # they have in common must advance in step.
            seed = int(self.integer(1 << 62)) + self.core.first_head
            with torch.random.fork_rng(devices=[q.device.index]):
                torch.cuda.manual_seed(seed)
                return super().attention(q, k, v, p, attn_mask=attn_mask, is_causal=is_causal)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
        return self.dropout(scores.softmax(-1), p, ("batch", "heads", "state", "state")) @ v


def draw_for_all_heads(mixer: Mixer) -> None:
    """Substitute the random numbers of what draws for the heads of a mixer: those of all heads, of which some are
    local."""
    for module, part, heads in mixer.draws_by_head():
        substitute(module, "random", HeadsOfCore(module.random, part, heads))
