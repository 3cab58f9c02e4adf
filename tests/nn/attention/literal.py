"""Helpers of the cores' tests: a core in float64, inputs, and sight as a plain matrix."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from xscale.core.config import Config
from xscale.nn.attention.core import CORES, Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize

HEADS, WIDTH = 4, 8
"""H and K."""


def build(config: Config, *, causal: bool, cross: bool = False, length: int = 256, spread: float = 0.5) -> Core:
    """The core in evaluation, in float64, its weights moved off their start by `spread`."""
    dims = Dims(width=32, depth=2, vocabulary=11, length=length, causal=causal, cross=cross)
    part = CORES.of(config).part
    assert part.check(config, dims, "core") == []
    core: Core = part(config, dims, HEADS, WIDTH)
    materialize(core, 0, dtype=torch.float64)
    with torch.no_grad():
        for at, parameter in enumerate(core.parameters()):
            parameter += spread * drawn(*parameter.shape, seed=50 + at)
    return core.eval()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(queries: int, keys: int | None = None, groups: int = 2, batch: int = 2) -> list[Tensor]:
    """q [B, H, T, K], k and v [B, G, S, K], asking for gradients."""
    keys = keys or queries
    shapes = [(batch, HEADS, queries, WIDTH), (batch, groups, keys, WIDTH), (batch, groups, keys, WIDTH)]
    return [drawn(*shape, seed=at).requires_grad_() for at, shape in enumerate(shapes)]


def packed(length: int, *starts: int) -> Tensor:
    """Documents [2, T] that begin at 0 and at `starts`; the second row's begin three tokens later."""
    token = torch.arange(length)
    rows = [sum((token >= start + late).long() for start in starts) + token * 0 for late in (0, 3)]
    return torch.stack(rows)


def seen(mask: AttentionMask) -> Tensor:
    """Bool [B or 1, 1, T, S]."""
    allowed = mask.allowed
    return torch.ones(1, 1, mask.queries, mask.keys, dtype=torch.bool) if allowed is None else allowed


def masks(length: int, *, causal: bool, documents: bool = True) -> list[AttentionMask]:
    """Plain, over a cache, and with documents."""
    found = [AttentionMask(length, length, causal)]
    if causal:
        found += [
            AttentionMask(1, length, True, offset=length - 1),
            AttentionMask(length // 3, length, True, length - length // 3),
        ]
    if documents:
        numbers = packed(length, 13, 60, 64)
        found.append(AttentionMask(length, length, causal, query_documents=numbers, key_documents=numbers))
        if causal:
            late = numbers[:, length // 2 :]
            found.append(
                AttentionMask(late.shape[1], length, True, length // 2, query_documents=late, key_documents=numbers)
            )
    return found


def agree(core: Core, mask: AttentionMask, reference: Any, groups: int = 2, tolerance: float = 1e-9) -> None:
    """The core against `reference(q, k, v, seen)` with k and v spread over all heads: values, and all gradients."""
    q, k, v = inputs(mask.queries, mask.keys, groups)
    leaves = [q, k, v, *(one for one in core.parameters() if one.requires_grad)]
    out = core(q, k, v, mask)
    wanted = reference(q, *(x.repeat_interleave(HEADS // groups, 1) for x in (k, v)), seen(mask))
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    above = drawn(*out.shape, seed=9)
    found, right = (torch.autograd.grad(x, leaves, above, allow_unused=True) for x in (out, wanted))
    for one, two, leaf in zip(found, right, leaves, strict=True):
        one, two = (torch.zeros_like(leaf) if x is None else x for x in (one, two))
        torch.testing.assert_close(one, two, rtol=tolerance * 10, atol=tolerance * 10)


def nearest_of_bucket(query_buckets: Tensor, key_buckets: Tensor, seen: Tensor, window: int, causal: bool) -> Tensor:
    """[B, H, T, S]: of the keys in sight that have the query's bucket, the last `window` up to its position, and in
    bidirectional models the next `window - 1`."""
    batch, heads, queries = query_buckets.shape
    keys = key_buckets.shape[2]
    shown = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h in product(range(batch), range(heads)):
        query_list, key_list = query_buckets[b, h].tolist(), key_buckets[b, h].tolist()
        for t, sight in enumerate(seen[min(b, len(seen) - 1), 0].tolist()):
            position = keys - queries + t
            bucket = [j for j in range(keys) if key_list[j] == query_list[t] and sight[j]]
            before, after = [j for j in bucket if j <= position], [j for j in bucket if j > position]
            shown[b, h, t, before[-window:] + ([] if causal else after[: window - 1])] = True
    return shown
