"""Relative local attention against section 3.5 of its paper, pair by pair."""

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.relative_local import RelativeLocal

HEADS, WIDTH, BLOCK = 2, 4, 3


def literal(core: RelativeLocal, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Output of each query by a loop over the keys of its own block and the one before."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(HEADS):
            group = h * k.shape[1] // HEADS
            for i in range(q.shape[2]):
                start = (i // BLOCK - 1) * BLOCK
                seen = [j for j in range(max(0, start), i + 1) if documents[b, j] == documents[b, i]]
                # The last row of the table is that of distance 0.
                rows = [core.table[h, 2 * BLOCK - 1 - (i - j)] for j in seen]
                scores = [q[b, h, i] @ (k[b, group, j] + row) for j, row in zip(seen, rows, strict=True)]
                weights = (torch.stack(scores) * WIDTH**-0.5).softmax(0)
                out[b, h, i] = sum(weight * v[b, group, j] for weight, j in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", [(1,), (3,), (11,), (4, 1, 6)])
def test_it_is_the_papers_definition(lengths: tuple[int, ...], groups: int) -> None:
    length = sum(lengths)
    core = ready(RelativeLocal(RelativeLocal.Config(block=BLOCK), dims(causal=True, length=length), HEADS, WIDTH))
    q, k, v = (drawn(2, n, length, WIDTH, seed=n + at).requires_grad_() for at, n in enumerate((HEADS, groups, groups)))
    documents = numbered(*lengths)
    packed = documents if len(lengths) > 1 else None
    mask = AttentionMask(length, length, True, query_documents=packed, key_documents=packed)
    outs = core(q, k, v, mask), literal(core, q, k, v, documents)
    leaves, slopes = [q, k, v, core.table], drawn(*q.shape, seed=7)
    gradients = [torch.autograd.grad((out * slopes).sum(), leaves) for out in outs]
    assert close(*outs)
    assert all(close(x, y) for x, y in zip(*gradients, strict=True))


def test_a_token_two_blocks_before_is_not_seen() -> None:
    """The negative control of the blocks: one token earlier than the block before changes nothing, one later does."""
    core = ready(RelativeLocal(RelativeLocal.Config(block=BLOCK), dims(causal=True, length=12), HEADS, WIDTH))
    q, k, v = (drawn(1, HEADS, 12, WIDTH, seed=seed) for seed in range(3))
    mask, plain = AttentionMask(12, 12, True), core(q, k, v, AttentionMask(12, 12, True))
    for place, changes in ((5, False), (6, True)):
        moved = k.clone()
        moved[:, :, place] += 1
        assert close(core(q, moved, v, mask)[:, :, 9:], plain[:, :, 9:]) != changes
