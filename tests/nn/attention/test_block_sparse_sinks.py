"""Attention sinks of the core block_sparse against loops over the definition, by each way to compute it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.conformance.made import drawn as drawn_by_shape
from tests.nn.attention.literal import HEADS, agree, build, drawn, inputs, masks, packed
from tests.nn.attention.test_block_terms import position_of
from tests.nn.attention.test_sinks import by_loops, sinks_of
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops import gathered
from xscale.nn.attention.ops.flex import FlexAttention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.pattern.window import Band, Window
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import PositionTerms

LEFT, BLOCK = 5, 4
SLIDING = Band.Config(left=LEFT, right=0)


def core_of(causal: bool = True, **config: Any) -> Core:
    keys: dict[str, Any] = {"pattern": SLIDING, "block": BLOCK, "sinks": True, **config}
    return build(BlockSparse.Config(**keys), causal=causal)


def within_window(core: Core, cap: float | None = None) -> Callable[..., Tensor]:
    """The loops over the keys that are at most LEFT tokens before the query."""
    dense = by_loops(core, cap)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None]
        return dense(q, k, v, seen & (distance <= LEFT) & (distance >= 0))  # type: ignore[no-any-return]

    return reference


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_sink_is_a_logit_of_each_head_in_the_denominator(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks: a sequence, the end of one, and one token over a cache."""
    monkeypatch.setattr(gathered, "CHUNK_SCORES", 8 * BLOCK * BLOCK)
    core = core_of(soft_cap=cap)
    for mask in masks(14, causal=True, documents=False):
        agree(core, mask, within_window(core, cap))


def test_packed_documents() -> None:
    core, documents = core_of(), packed(14, 4, 7)
    agree(core, AttentionMask(14, 14, True, query_documents=documents, key_documents=documents), within_window(core))


def test_a_query_without_keys_keeps_zero() -> None:
    """Block 2 of the pattern is seen by no query, and its queries see nothing: their sink gets no gradient."""
    core = core_of(pattern=Window.Config(window=3), causal=True)
    q, k, v = inputs(12)
    documents = torch.tensor([[0] * 4 + [1] * 8, [0] * 4 + [1] * 8])
    keys = documents.masked_fill(documents == 1, 2)
    out = core(q, k, v, AttentionMask(12, 12, True, query_documents=documents, key_documents=keys))
    assert not out[:, :, 4:].any()
    gradients = torch.autograd.grad(out[:, :, 4:].sum(), [q, k, v, sinks_of(core)])
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packs", [False, True])
def test_the_fused_operator_equals_gathered_blocks(packs: bool, causal: bool) -> None:
    documents = packed(37, 13, 20) if packs else None
    mask = AttentionMask(37, 37, causal, query_documents=documents, key_documents=documents)
    same_numbers(("kernel", "gather"), mask, Window.Config(window=3))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packs", [False, True])
def test_flex_equals_gathered_blocks(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's reference of FlexAttention has a backward on a CPU, which torch only refuses to call.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(FlexAttention, "why_unsupported", staticmethod(lambda q: None))
    documents = packed(37, 13, 20) if packs else None
    same_numbers(("flex", "gather"), AttentionMask(37, 37, True, query_documents=documents, key_documents=documents))


def same_numbers(ways: tuple[str, str], mask: AttentionMask, pattern: Any = SLIDING) -> None:
    """The output and all gradients by two implementations."""
    results = []
    for name in ways:
        core = core_of(mask.causal, implementation=name, pattern=pattern)
        assert isinstance(core, BlockSparse)
        q, k, v = inputs(mask.queries)
        assert core._implementation(q, mask, 0.0, core._grid(mask, HEADS, 0)) == name
        out = core(q, k, v, mask)
        results.append([out, *torch.autograd.grad(out, [q, k, v, sinks_of(core)], drawn(*out.shape, seed=9))])
    assert results[0][-1].all(), "each sink has a gradient"
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tables", [True, False])
def test_terms_of_a_position(tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tables of distances on gathered blocks, and by operators that keep all scores, where there are none."""
    core, position = core_of(), position_of("shaw", True)
    if not tables:
        monkeypatch.setattr(type(position), "has_tables", False)
        monkeypatch.setattr(PositionTerms, "tables", lambda self, q: None)
    length = 14
    q, k, v = (drawn_by_shape(2, heads, length, 8, seed=at).requires_grad_() for at, heads in enumerate((4, 2, 2)))
    terms = PositionTerms(position, Pairs(length, length, causal=True))
    mask = AttentionMask(length, length, True, position_terms=terms)
    assert isinstance(core, BlockSparse)
    way = core._implementation(q, mask, 0.0, core._grid(mask, HEADS, 0))
    assert way == ("gather" if tables else "all scores")
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance > LEFT)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + terms.scores(q, k)
    column = sinks_of(core)[None, :, None, None].expand(2, -1, length, 1)
    weights = torch.cat((scores.masked_fill(hidden, float("-inf")), column), -1).softmax(-1)[..., :-1]
    expected = weights @ v.repeat_interleave(2, 1) + terms.values(weights)
    out = core(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves, above = [q, k, v, sinks_of(core), *position.parameters()], drawn(*out.shape, seed=9)
    gradients = torch.autograd.grad(out, leaves, above)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, above), rtol=1e-9, atol=1e-10)


@pytest.mark.long
def test_dropout_drops_weights_that_the_sink_has_lowered() -> None:
    """The same weights are dropped as without sinks, and backward drops them again."""
    mask, (q, k, v) = AttentionMask(14, 14, True, dropout=0.3), inputs(14)
    plain, sunk = core_of(sinks=False).train(), core_of().train()

    def run(core: Core) -> Tensor:
        torch.manual_seed(5)
        return core(q, k, v, mask)  # type: ignore[no-any-return]

    whole = core_of(sinks=False)
    share = core_of()(q, k, v, mask) / whole(q, k, v, mask)  # [B, H, T, K], the same for all channels
    torch.testing.assert_close(run(sunk), run(plain) * share, rtol=1e-9, atol=1e-11)
    leaves, above = [q, k, v], drawn(2, HEADS, 14, 8, seed=9)
    gradients = torch.autograd.grad(run(sunk), leaves, above)
    torch.testing.assert_close(gradients, torch.autograd.grad(run(plain) * share, leaves, above), rtol=1e-8, atol=1e-10)
    assert torch.autograd.gradcheck(
        lambda sinks: torch.func.functional_call(sunk, {"sinks": sinks}, (q, k, v, mask)) if seeded() else None,
        (sinks_of(sunk).detach().requires_grad_(),),
    )


def seeded() -> bool:
    torch.manual_seed(5)
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["kernel", "flex"])
def test_fused_ways_on_a_gpu_equal_gathered_blocks(way: str) -> None:
    torch.compiler.reset()
    results = []
    for name in (way, "gather"):
        core = core_of(implementation=name, pattern=Window.Config(window=3), block=64).float().cuda()
        q, k, v = (torch.cat((x, x), -1).detach().float().cuda().requires_grad_() for x in inputs(300))
        out = core(q, k, v, AttentionMask(300, 300, True))
        above = drawn(*out.shape, seed=9).float().cuda()
        results.append([out, *torch.autograd.grad(out, [q, k, v, sinks_of(core)], above)])
    for fused, by_blocks in zip(*results, strict=True):
        torch.testing.assert_close(fused, by_blocks, rtol=1e-2, atol=1e-2 * by_blocks.abs().max().item())
