"""Block-sparse attention on a CPU over drawn shapes: whatever may meet, against the dense definition in float64."""

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some
from torch import Tensor

from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import PATTERNS
from xscale.nn.position.alibi import slopes
from xscale.nn.position.relative import Relative

NAMES = PATTERNS.names()


def added(kind: str, heads: int, length: int, causal: bool) -> tuple[Tensor | None, list[Tensor], Any]:
    """[1, H, T, T]: none, ALiBi's slopes or T5's buckets with drawn numbers; these numbers; the same by distance."""
    place = torch.arange(length)
    if kind == "none":
        return None, [], None
    if kind == "alibi":
        slope = torch.tensor(slopes(heads), dtype=torch.float64)[:, None]
        dense = -slope[None, :, :, None] * (place[:, None] - place[None]).abs()
        return dense, [], lambda after: -slope * after.abs()
    dims = Dims(width=8, depth=1, vocabulary=2, length=length, causal=causal, std=1.0)
    part = Relative(Relative.Config(), dims, heads)
    materialize(part, 0, dtype=torch.float64)
    return part.bias(place[None], place[None]), [part.weight], part.relative_bias


def seen_by(core: BlockSparse, mask: AttentionMask, heads: int, block: int) -> Tensor:
    """Bool [B or 1, H, T, T]."""
    length, place = mask.keys, torch.arange(mask.keys)
    seen = torch.zeros(heads, length, length, dtype=torch.bool)
    for layout, rule in core.pattern.masked_layouts(Grid(-(-length // block), heads, mask.causal, block, layer=1)):
        blocks = torch.from_numpy(layout.copy()).repeat_interleave(block, 1).repeat_interleave(block, 2)
        blocks = blocks[:, :length, :length]
        seen |= blocks if rule is None else blocks & rule(place[:, None], place[None])
    return seen[None] if mask.allowed is None else seen[None] & mask.allowed


def kept(core: BlockSparse, q: Tensor, k: Tensor, mask: AttentionMask, weights: Tensor, seed: int) -> Tensor:
    """Factor of each weight [B, H, T, T], 0 or 1 / (1 - dropout): read off values that are unit vectors."""
    width, found = k.shape[-1], []
    for first in range(0, mask.keys, width):
        unit = torch.eye(mask.keys, dtype=k.dtype)[:, first : first + width]
        unit = torch.nn.functional.pad(unit, (0, width - unit.shape[1]))
        torch.manual_seed(seed)
        found.append(core(q, k, unit.expand(*k.shape[:2], -1, -1).contiguous(), mask))
    dropped = torch.cat(found, -1)[..., : mask.keys]
    factor = dropped.ne(0).to(weights.dtype) / (1 - mask.dropout)
    torch.testing.assert_close(dropped, weights * factor, rtol=1e-9, atol=1e-9)
    # A weight that rounds to nothing tells nothing.
    told = weights > 1e-12
    share, count = float((dropped == 0)[told].double().mean()), int(told.sum())
    assert abs(share - mask.dropout) < 5 * (mask.dropout * (1 - mask.dropout) / count) ** 0.5 + 1 / count
    return factor


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=some.sampled_from(NAMES),
    length=some.integers(1, 90),
    width=some.sampled_from([1, 3, 16, 40, 256]),
    block=some.sampled_from([1, 4, 16, 24]),
    groups=some.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    causal=some.booleans(),
    cap=some.sampled_from([None, 2.0]),
    bias=some.sampled_from(["none", "alibi", "buckets"]),
    uses_relative_bias=some.booleans(),
    starts=some.lists(some.integers(1, 89), max_size=3),
    dropout=some.sampled_from([0.0, 0.0, 0.4]),
    seed=some.integers(0, 99),
)
@example("bigbird", 77, 256, 16, (4, 2), True, 2.0, "buckets", False, [13, 40], 0.4, 1)
@example("bigbird", 77, 256, 16, (4, 2), True, 2.0, "buckets", True, [13, 40], 0.4, 1)
@example("band", 90, 40, 24, (4, 2), False, None, "alibi", True, [7], 0.4, 2)
def test_it_is_the_dense_softmax_over_what_is_seen(
    name: str,
    length: int,
    width: int,
    block: int,
    groups: tuple[int, int],
    causal: bool,
    cap: float | None,
    bias: str,
    uses_relative_bias: bool,
    starts: list[int],
    dropout: float,
    seed: int,
) -> None:
    traits = PATTERNS.get(name).traits
    causal = traits.causal and (causal or not traits.bidirectional)
    heads, keys = groups
    dims = Dims(width=8, depth=2, vocabulary=2, length=length, causal=causal, layer=1)
    config = BlockSparse.Config(pattern=PATTERNS.get(name).part.Config(), block=block, soft_cap=cap)
    core: BlockSparse = CORES.build(config, dims, heads, width)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, length, width), (2, keys, length, width), (2, keys, length, width)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    documents = sum(((torch.arange(length) >= start).long() for start in starts), torch.zeros(length).long())
    documents = documents.expand(2, -1)
    extra: dict[str, Any] = {"query_documents": documents, "key_documents": documents} if starts else {}
    numbers, table, relative_bias = added(bias, heads, length, causal)
    extra |= {"relative_bias": relative_bias} if uses_relative_bias else {"bias": numbers}
    mask = AttentionMask(length, length, causal, dropout=dropout, **extra)
    torch.manual_seed(seed)
    out = core(q, k, v, mask)
    spread_k, spread_v = (x.repeat_interleave(heads // keys, 1) for x in (k, v))
    scores = q @ spread_k.mT * width**-0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if numbers is None else scores + numbers
    seen = seen_by(core, mask, heads, block)
    # A query that sees nothing gets zeros.
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    if dropout:
        weights = weights * kept(core, q.detach(), k.detach(), mask, weights.detach(), seed)
    wanted = weights @ spread_v
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    above = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    leaves = (q, k, v, *table)
    # Both were made of one table.
    grads = [torch.autograd.grad(x, leaves, above, retain_graph=True) for x in (out, wanted)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
