"""Persistent memory against the paper's equation, one query at a time, and what its vectors are not told."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import HEADS, WIDTH, agree, build, drawn, inputs, masks
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.persistent_memory import PersistentMemory
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize

N = 5


def built(*, causal: bool, cross: bool = False) -> Core:
    return build(PersistentMemory.Config(persistent=N), causal=causal, cross=cross)


def attended(core: Core, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax over the keys in sight and the head's persistent keys, whose scores have no bias."""
    rows = []
    for b in range(q.shape[0]):
        for h in range(HEADS):
            for t in range(q.shape[2]):
                places = [s for s in range(k.shape[2]) if seen[min(b, len(seen) - 1), 0, t, s]]
                added = [0.0 if bias is None else bias[0, h, t, s] for s in places]
                scores = [q[b, h, t] @ k[b, h, s] / WIDTH**0.5 + plus for s, plus in zip(places, added, strict=True)]
                scores += [q[b, h, t] @ core.memory_keys[h, n] / WIDTH**0.5 for n in range(N)]
                values = torch.cat((v[b, h, places], core.memory_values[h]))
                rows.append(torch.stack(scores).softmax(0) @ values)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool) -> None:
    core = built(causal=causal)
    for mask in masks(18, causal=causal):
        agree(core, mask, lambda *x: attended(core, *x))


def test_another_sequence() -> None:
    core = built(causal=False, cross=True)
    agree(core, AttentionMask(7, 12, causal=False), lambda *x: attended(core, *x))


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_is_added_to_the_sequence_alone(causal: bool) -> None:
    core, (q, k, v) = built(causal=causal), inputs(12, groups=HEADS)
    bias = drawn(1, HEADS, 12, 12, seed=7)
    mask = AttentionMask(12, 12, causal, bias=bias)
    seen = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    wanted = attended(core, q, k, v, seen.tril() if causal else seen, bias)
    torch.testing.assert_close(core(q, k, v, mask), wanted, rtol=1e-10, atol=1e-10)


def test_vectors_that_nobody_looks_at_leave_softmax_attention() -> None:
    core, plain = built(causal=True), build(Softmax.Config(), causal=True)
    q, k, v = inputs(12)
    q = q.detach()
    q[..., 0] = 1.0
    with torch.no_grad():
        core.memory_keys.zero_()
        core.memory_keys[..., 0] = -1e4
    mask = AttentionMask(12, 12, causal=True)
    torch.testing.assert_close(core(q, k, v, mask), plain(q, k, v, mask), rtol=1e-12, atol=1e-12)


def test_they_start_with_the_papers_variances() -> None:
    core = PersistentMemory(PersistentMemory.Config(persistent=400), Dims(64, 2, 11, 16, causal=True), 4, 16)
    materialize(core, 0)
    assert abs(core.memory_keys.std().item() * 16**0.5 - 1) < 0.03
    assert abs(core.memory_values.std().item() * 400**0.5 - 1) < 0.03
