"""Random numbers inside a model: every draw of a forward goes through `RandomNumbers`, and is the same on every layout.

Two kinds of draw:

- In order: from torch's default generators, which `reseed` seeds at each block by (seed, step, micro-batch, block). A
  draw names the axes of its shape; where an axis is sharded, the parallel layer substitutes `Module.random`, so that a
  rank draws the numbers of the global tensor and takes its slice. All ranks then draw equally much, in one order.
- Hashed: a function of a seed and of each element's place in the global tensor, for tensors whose rows travel between
  ranks (`hashed_dropout`), or of which nobody has more than a block at a time.

Nothing else in `xscale.nn` calls a random function of torch, except the initialisers of weights.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.axes import Axis
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale_kernels.bias_dropout_residual.op import bias_dropout_residual

Shape = tuple[int, ...]
Make = Callable[[Shape], Tensor]
"""Draws a tensor of a shape from torch's default generator."""

_FIRST, _SECOND, _STEP = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


def reseed(rng_seed: int, path: str) -> None:
    """Seed torch's generators for the module at `path`; `rng_seed` is the micro-batch's, `Tokens.rng_seed`."""
    seed = seed_of(rng_seed, path)
    torch.default_generator.manual_seed(seed)
    # torch.manual_seed notes the call's traceback for devices that nothing has used yet: 0.25 ms a block on a CPU.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


class RandomNumbers:
    """Draws of a module whose tensors are not sharded: plain draws from torch's default generators.

    `dims` names the axes of a draw's shape, one each. `tokens` are those that the forward got: a draw over the
    sequence, whose axis is "tokens", needs them.
    """

    def draw(
        self, make: Make, shape: Shape, dims: tuple[Axis, ...], tokens: Tokens | None = None
    ) -> Tensor:
        """`make(shape)`. Where one of `dims` is sharded: this rank's slice of `make` at the global shape."""
        return make(shape)

    def offset(self, dim: Axis) -> int:
        """Index in the global tensor of the first local element along a dim, for hashed draws."""
        return 0

    def uniform(
        self,
        like: Tensor,
        dims: tuple[Axis, ...],
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        low: float = 0.0,
        high: float = 1.0,
    ) -> Tensor:
        """Uniform numbers in [low, high) on the device of `like`; shape and dtype are those of `like` unless given."""
        shape = tuple(like.shape) if shape is None else shape
        return self.draw(
            lambda size: like.new_empty(size, dtype=dtype).uniform_(low, high), shape, dims
        )

    def normal(self, like: Tensor, dims: tuple[Axis, ...], tokens: Tokens | None = None) -> Tensor:
        """Standard normal numbers with shape, dtype and device of `like`."""
        return self.draw(
            lambda size: like.new_empty(size).normal_(), tuple(like.shape), dims, tokens
        )

    def gumbel(self, like: Tensor, dims: tuple[Axis, ...], tokens: Tokens | None = None) -> Tensor:
        """Gumbel noise, -log(-log u), with shape, dtype and device of `like`."""
        return self.draw(
            lambda size: -like.new_empty(size).exponential_().log(), tuple(like.shape), dims, tokens
        )

    def integer(self, high: int, device: torch.device | str = "cpu") -> Tensor:
        """One integer in [0, high), int64 []: the same on all ranks of a layout, so fit to seed what they share."""
        return torch.randint(high, (), device=device)

    def integers(
        self, high: int, shape: Shape, dims: tuple[Axis, ...], device: torch.device
    ) -> Tensor:
        """Integers in [0, high), int64 of this shape."""
        return self.draw(lambda size: torch.randint(high, size, device=device), shape, dims)

    def dropout(
        self, x: Tensor, p: float, dims: tuple[Axis, ...], tokens: Tokens | None = None
    ) -> Tensor:
        """Set each element to 0 with probability `p`, and divide the others by 1 - p."""
        # torch draws in the order of memory, which must be that of the dims to be sliced.
        return F.dropout(x.contiguous(), p) if p else x

    def dropout_add(
        self,
        x: Tensor,
        residual: Tensor,
        p: float,
        tokens: Tokens,
        implementation: str | None = None,
    ) -> Tensor:
        """residual + dropout(x, p), all [B, T, D], by the kernel `bias_dropout_residual`."""
        return bias_dropout_residual(x, residual, p=p, implementation=implementation)

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
        """Dot-product attention with dropout of the weights: q [B, H, T, K], k and v [B, G, S, K] -> [B, H, T, K].

        By torch's fused attention, which draws its own mask.
        """
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.shape[2] == 1 and not p and (attn_mask is None or attn_mask.shape[1] == 1):
            # A single query: those of a group are the rows of one head, so that no key is repeated.
            packed = q.reshape(*k.shape[:2], -1, q.shape[3])  # [B, G, H / G, K]
            mixed = F.scaled_dot_product_attention(packed, k, v, attn_mask=attn_mask)
            return mixed.reshape(q.shape)
        if grouped and attn_mask is not None and q.is_cuda:
            # Flash takes no mask, and the memory-efficient kernel no groups: torch would compute all scores.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal, enable_gqa=grouped
        )


class SeededNumbers:
    """A stream of random numbers of its own, on the CPU, that is a function of the seed alone."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, float64."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers in [0, high), int64."""
        return torch.randint(high, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        """The integers below `count` in random order, int64 [count]."""
        return torch.randperm(count, generator=self._generator)


def hashed_dropout(x: Tensor, p: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Dropout of x [..., R, C] whose mask is a function of the rows' keys [..., R] and the columns' [..., C], int64.

    Keys are what is hashed: make them from a seed and the row's place in the global tensor, by `hash63`.
    """
    if not p:
        return x
    bits = _to_int32(rows)[..., :, None] ^ _to_int32(hash63(columns))[..., None, :]
    # The finaliser lowbias32 (Wellons 2018) in place; the masks drop the sign bits that the shifts bring in.
    bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)
    bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    kept = bits >= min(round(p * 2**32), 2**32 - 1) - 2**31
    return x * kept / (1 - p)


def _to_int32(hashed: Tensor) -> Tensor:
    """The upper 32 of 63 bits."""
    return ((hashed >> 31) - 2**31).to(torch.int32)


def hash63(*values: Tensor | int) -> Tensor:
    """63 bits that depend on all of `values` (int64, broadcast), in [0, 2^63), the same on every device.

    The finaliser of SplitMix (Steele et al. 2014).
    """
    state = torch.zeros((), dtype=torch.int64)
    for value in values:
        # int64 wraps around; the masks drop the sign bits that the shifts bring in.
        state = _finish(state + value + _STEP)
    return state & 0x7FFF_FFFF_FFFF_FFFF


def _finish(state: Tensor) -> Tensor:
    state = (state ^ ((state >> 30) & 0x3_FFFF_FFFF)) * _FIRST
    state = (state ^ ((state >> 27) & 0x1F_FFFF_FFFF)) * _SECOND
    return state ^ ((state >> 31) & 0x1_FFFF_FFFF)
