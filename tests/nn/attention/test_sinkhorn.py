"""Sparse Sinkhorn attention against its definition, block by block."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, drawn, inputs, masks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.sinkhorn import SinkhornCore, sinkhorn_normalize

LENGTH, BLOCK = 45, 8


def sorting(core: SinkhornCore, k: Tensor, causal: bool) -> Tensor:
    """[B, H, N, N] written with plain sums of exponentials."""
    length, blocks = k.shape[2], -(-k.shape[2] // BLOCK)
    means = []
    for at in range(blocks):
        tokens = k[:, :, : at * BLOCK] if causal else k[:, :, at * BLOCK : min(length, at * BLOCK + BLOCK)]
        means.append(tokens.mean(2) if tokens.shape[2] else torch.zeros_like(k[:, :, 0]))
    hidden = (torch.stack(means, 2) @ core.first).clamp(min=0)
    p = ((hidden @ core.second)[..., :blocks] / 0.75).exp()
    if causal:
        p = p * torch.ones(blocks, blocks).tril(-1)
    for _ in range(7):
        rows = p.sum(-1, keepdim=True)
        p = p / rows.where(rows > 0, 1.0)
        columns = p.cumsum(-2) if causal else p.sum(-2, keepdim=True)
        p = p / columns.where(columns > 0, 1.0)
    return p


def received(places: Tensor, cells: list[list[Tensor]], at: int) -> list[Tensor]:
    """Keys or values [B, H, K] that block `at` receives, place by place, from the blocks that have the place."""
    got = []
    for place in range(len(cells[0])):
        having = [j for j, cell in enumerate(cells) if place < len(cell)]
        mixed = sum(places[:, :, at, j, None] * cells[j][place] for j in having)
        # A short last block leaves the weight of a place to the others.
        got.append(mixed * (places[:, :, at].sum(-1) / places[:, :, at, having].sum(-1))[..., None])
    return got


@pytest.mark.parametrize("length", [LENGTH, 24, 5, 1])
@pytest.mark.parametrize("cut", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_block_sees_itself_and_what_was_sorted_to_it(causal: bool, cut: int | None, length: int) -> None:
    if causal and cut:
        cut = None
    core = build(SinkhornCore.Config(block=BLOCK, sortcut_blocks=cut), causal=causal, length=64)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first, length = k.shape[2] - q.shape[2], k.shape[2]
        p = sorting(core, k, causal)
        cells_k, cells_v = ([list(block.unbind(2)) for block in x.split(BLOCK, 2)] for x in (k, v))
        out = []
        for at in range(first, length):
            block = at // BLOCK
            own = slice(block * BLOCK, at + 1 if causal else min(length, (block + 1) * BLOCK))
            keys, values = list(k[:, :, own].unbind(2)), list(v[:, :, own].unbind(2))
            shown = [block] if (block and causal) or not causal else []
            if cut:
                keys, values, shown = [], [], list(range(min(cut, len(cells_k))))
            for row in shown:
                keys += received(p, cells_k, row)
                values += received(p, cells_v, row)
            weights = torch.softmax(q[:, :, at - first, None] @ torch.stack(keys, 2).mT / 8**0.5, -1)
            out.append(weights @ torch.stack(values, 2))
        return torch.cat(out, 2)

    for mask in masks(length, causal=causal, documents=False):
        if mask.queries:
            agree(core, mask, reference, tolerance=1e-7)


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_ones_stay_ones_at_any_length(cut: int | None) -> None:
    """The weights of a matrix that is balanced to the end sum to 1."""
    config = SinkhornCore.Config(block=BLOCK, sortcut_blocks=cut, iterations=200)
    core = build(config, causal=False, length=64, spread=0.1)
    for length in range(1, 3 * BLOCK + 1):
        q, k, v = inputs(length)
        out = core(q, k, torch.ones_like(v), AttentionMask(length, length, False))
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=1e-6)


def test_balanced_matrices_are_doubly_stochastic() -> None:
    p = sinkhorn_normalize(drawn(3, 6, 6), 100, causal=False)
    for dim in (-1, -2):
        torch.testing.assert_close(p.sum(dim), torch.ones(3, 6, dtype=p.dtype))


def test_training_sorts_with_noise() -> None:
    core = build(SinkhornCore.Config(block=BLOCK), causal=True, length=64).train()
    q, k, v = inputs(40)
    mask = AttentionMask(40, 40, True)
    assert not torch.equal(core(q, k, v, mask), core(q, k, v, mask))
