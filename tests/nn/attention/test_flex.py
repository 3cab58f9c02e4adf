"""FlexAttention with biases and terms by distance, against the definition, `gather` and the dense core.

Without a GPU torch runs its dense reference of FlexAttention. It has a backward, which torch only refuses to call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.conformance.made import dims, drawn, numbered, ready
from tests.nn.attention.test_block_sparse import agree, core_of, inputs, seen_of
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.attention.ops import flex
from xscale.nn.attention.ops.flex import FlexAttention, KeyBlocks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.score_terms import ScoreTerms
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.attention import Attention
from xscale.nn.pattern.bigbird import BigBirdPattern
from xscale.nn.pattern.longformer import LongformerPattern
from xscale.nn.pattern.window import Band, Window
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.position import POSITIONS, PositionTerms
from xscale.nn.tokens import Tokens

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
DOCUMENTS = numbered(20, 31, 26)


@pytest.fixture
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(FlexAttention, "why_unsupported", staticmethod(lambda q: None))


@pytest.fixture
def fresh_graphs() -> None:
    # After eight graphs of one function torch.compile gives up, and the reference would be compared with itself.
    torch.compiler.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, backward_on_a_cpu: None, fresh_graphs: None) -> None:
    """Trace forward and backward as for a GPU, and run them by the reference."""
    function = torch.compile(flex_attention.flex_attention, backend="aot_eager")
    monkeypatch.setattr(FlexAttention, "_function", lambda self, q: function)


def random(*shape: int) -> Tensor:
    return drawn(*shape, seed=3).requires_grad_()


@pytest.mark.parametrize(("causal", "groups", "cap", "documents"), [(True, 1, None, DOCUMENTS), (False, 2, 1.5, None)])
@pytest.mark.usefixtures("backward_on_a_cpu")
def test_biases_equal_the_definition(causal: bool, groups: int, cap: float | None, documents: Tensor | None) -> None:
    core = core_of(BigBirdPattern.Config(random_blocks=2), causal=causal, implementation="flex", soft_cap=cap)
    places = torch.arange(77)
    after = places[None] - places[:, None]  # [T, S], key - query
    around: dict[str, Any] = {"query_documents": documents, "key_documents": documents}
    by_pair, table, clipped = random(1 if causal else 2, 4, 77, 77), random(4, 153), random(4, 11)
    agree(core, AttentionMask(77, 77, causal, bias=by_pair, **around), groups, (by_pair,))
    for numbers, reach in ((table, None), (clipped, 5)):

        def bias(offsets: Tensor, numbers: Tensor = numbers, reach: int = reach or 76) -> Tensor:
            return numbers[:, offsets.clamp(-reach, reach) + reach]

        mask = AttentionMask(77, 77, causal, relative_bias=bias, bias_reach=reach, **around)
        agree(core, mask, groups, (numbers,), literal=AttentionMask(77, 77, causal, bias=bias(after)[None], **around))


@pytest.mark.parametrize(
    ("position", "causal", "changes", "lengths"),
    [
        ({"kind": "alibi"}, True, {"kv_heads": 2}, (40,)),
        ({"kind": "relative", "buckets": 8, "distance": 9}, False, {"core": {"soft_cap": 2.0}}, (13, 27)),
        ({"kind": "shaw", "distance": 3, "values": False}, True, {"core": {"soft_cap": 2.0}}, (40,)),
        ({"kind": "music_transformer"}, False, {"kv_heads": 2}, (40,)),
        ({"kind": "transformer_xl"}, True, {"scale": 0.3, "kv_heads": 2, "core": {"soft_cap": 2.0}}, (13, 27)),
        ({"kind": "deberta", "buckets": 4, "distance": 8}, False, {"scale": 0.3, "kv_heads": 2}, (40,)),
        ({"kind": "none"}, True, {"core": {"kind": "adaptive_span", "initial_span": 9.0, "ramp": 4.0}}, (40,)),
    ],
    ids=lambda value: str(value.get("kind", "")) if isinstance(value, dict) else str(value),
)
@pytest.mark.usefixtures("compiled")
def test_positions_equal_the_dense_core(
    position: dict[str, Any], causal: bool, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """A mixer's output and the gradients of its input and of all its parameters."""
    calls, results = [], []
    length, documents = sum(lengths), numbered(*lengths) if len(lengths) > 1 else None
    for name in ("flex", "dense"):
        core = {"kind": "softmax", **changes.get("core", {}), "implementation": name}
        config = decode(Attention.Config, {"heads": 4, "position": position, **changes, "core": core})
        mixer = ready(Attention(config, dims(causal=causal, length=length)))
        assert isinstance(mixer.core, Softmax)
        mixer.core._flex.attend = lambda *call, of=mixer.core._flex.attend: calls.append(call) or of(*call)  # type: ignore[method-assign]
        x = drawn(2, length, 32).requires_grad_()
        out = mixer(x, Tokens.from_ids(torch.zeros(2, length, dtype=torch.long), documents))
        above = drawn(*out.shape, seed=5)
        results.append([out, *torch.autograd.grad(out, [x, *mixer.parameters()], above)])
    assert len(calls) == 1
    for by_flex, all_scores in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, all_scores, rtol=1e-9, atol=1e-10)


def test_when_the_dense_core_takes_flex() -> None:
    def taken(kind: str, implementation: str = "flex", decode: bool = False, **options: Any) -> bool:
        core = Softmax(Softmax.Config(implementation=implementation), dims(), 4, 8)
        entry, q = POSITIONS.get(kind), drawn(2, 4, 1 if decode else 20, 8)
        position = entry.part(entry.part.Config(**options), dims(), 4, 8)
        pairs = Pairs(q.shape[2], 20, causal=True)
        terms = PositionTerms(position, pairs) if position.adds_scores else None
        return core._uses_flex(q, AttentionMask(q.shape[2], 20, True, offset=20 - q.shape[2], position_terms=terms))

    assert taken("none")
    assert taken("shaw", values=False)
    assert not taken("shaw", "dense")
    with pytest.raises(ConfigError, match="flex does not support this call: it takes terms of the scores by distance"):
        taken("shaw")
    assert not taken("none", decode=True)
    assert not taken("none", "auto"), "a CPU has no fused FlexAttention"
    core = Softmax(Softmax.Config(implementation="flex"), dims(), 4, 8)
    with pytest.raises(ConfigError, match="no gradients on a CPU"):
        core(*inputs(20, 20), AttentionMask(20, 20, True))


def test_packed_documents_take_flex_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It skips blocks of other documents, where torch's fused attention needs a mask [B, 1, T, T]."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    core, q = Softmax(Softmax.Config(), dims(), 4, 64), torch.zeros(1, 4, 20, 64)
    documents = torch.zeros(1, 20, dtype=torch.long)
    packed = AttentionMask(20, 20, True, query_documents=documents, key_documents=documents)
    assert core._uses_flex(q, packed)
    assert not core._uses_flex(q, AttentionMask(20, 20, True))
    assert not core._uses_flex(q.double(), packed)
    assert not core._uses_flex(q, replace(packed, dropout=0.1)), "FlexAttention has no dropout"
    assert core.eval()._uses_flex(q, replace(packed, dropout=0.1))


@pytest.mark.parametrize("length", [300, 384])
def test_each_tile_with_a_visible_score_is_read(length: int) -> None:
    """The reference ignores the blocks that the fused kernels read, so they are compared with the visible scores.

    A block that is read without the mask holds nothing but visible scores; of queries that pad the last one, any.
    """

    def tiles(visible: Tensor) -> Tensor:
        beyond = -length % 128
        keys = torch.nn.functional.pad(visible, (0, beyond))
        return torch.nn.functional.pad(keys, (0, 0, 0, beyond)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))

    def listed(counts: Tensor, order: Tensor) -> Tensor:
        first = torch.arange(order.shape[-1]) < counts[..., None]
        return torch.zeros_like(first).scatter(-1, order.long(), first)

    def check(blocks: KeyBlocks, visible: Tensor) -> int:
        """Compare them, and count those that are read without the mask."""
        cut = listed(blocks.counts, blocks.order)
        unmasked = torch.zeros_like(cut) if blocks.unmasked is None else listed(*blocks.unmasked)
        assert not (cut & unmasked).any(), "a block is read twice"
        assert not (tiles(visible).any(-1).any(-2) & ~(cut | unmasked)).any(), "a block is not read"
        padding = torch.arange(length + -length % 128) >= length
        hidden = ~tiles(visible) & ~padding.view(-1, 128)[:, :, None, None]
        assert not (hidden.any(-1).any(-2) & unmasked).any(), "a hidden score is read"
        assert not (cut | unmasked).all() or not visible.tril().equal(visible)
        return int(unmasked.sum())

    documents = numbered(100, 30, length - 130)
    for causal in (True, False):
        mask = AttentionMask(length, length, causal, query_documents=documents, key_documents=documents)
        assert mask.allowed is not None
        packed = check(KeyBlocks.of_mask(mask, documents.device), mask.allowed)
        plain = AttentionMask(length, length, causal)
        every = torch.ones(1, 1, length, length, dtype=torch.bool)
        dense = check(KeyBlocks.of_mask(plain, documents.device), every.tril() if causal else every)
        assert dense == (3 if causal else 6)
        assert packed < dense
        for pattern in (BigBirdPattern.Config(), Window.Config(window=3), Band.Config(left=40, right=0)):
            core = core_of(pattern, causal=causal)
            grid = core._grid(mask, 4, 0)
            layouts = partial(core.pattern.masked_layouts, grid)
            assert core._flex.pattern_blocks(layouts, grid, documents.device, packed=True).unmasked is None
            blocks = core._flex.pattern_blocks(layouts, grid, documents.device)
            check(blocks, seen_of(core, length))
            read = listed(blocks.counts, blocks.order)
            assert not isinstance(pattern, Window.Config) or not read.all(), "no block is skipped"
    # 128 global tokens are a whole column, and a whole row apart from its last block.
    core = core_of(LongformerPattern.Config(window=3, global_block_indices=tuple(range(16))), causal=False)
    grid = core._grid(AttentionMask(length, length, False), 4, 0)
    blocks = core._flex.pattern_blocks(partial(core.pattern.masked_layouts, grid), grid, documents.device)
    assert check(blocks, seen_of(core, length)) == (4 if length == 384 else 3)


@pytest.mark.nightly
@pytest.mark.usefixtures("backward_on_a_cpu", "fresh_graphs")
def test_more_structures_than_torch_has_graphs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its limit of eight torch would compute all scores; past ours the run ends with a sentence."""
    import torch._dynamo

    ruled, plain = Band.Config(left=40, right=0), BigBirdPattern.Config()
    packed = {"query_documents": numbered(30, 50), "key_documents": numbered(30, 50)}
    biased = {"bias": torch.zeros(1, 4, 80, 80)}
    q, k, v = (x.detach() for x in inputs(80, 80))

    def outputs(implementation: str) -> list[Tensor]:
        return [
            core_of(pattern, causal=True, implementation=implementation, soft_cap=cap)(
                q, k, v, AttentionMask(80, 80, True, **around, **added)
            )
            for pattern in (plain, ruled)
            for cap in (None, 2.0)
            for added in ({}, biased)
            for around in ({}, packed)
        ]

    expected = outputs("gather")
    for limit, enough in ((flex.GRAPHS, True), (8, False)):
        torch._dynamo.reset()
        flex.compiled_flex_attention.cache_clear()
        monkeypatch.setattr(flex, "GRAPHS", limit)
        # The option is the test's own, not the process's.
        with torch._dynamo.config.patch(recompile_limit=8):
            function = flex.compiled_flex_attention("eager")
            monkeypatch.setattr(FlexAttention, "_function", lambda self, q, function=function: function)
            if enough:
                for out, gather in zip(outputs("flex"), expected, strict=True):
                    torch.testing.assert_close(out, gather)
            else:
                with pytest.raises(ConfigError, match="has 8 graphs"):
                    outputs("flex")
    flex.compiled_flex_attention.cache_clear()


class _Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize(
    ("kind", "options", "allowed"), [("alibi", {}, 4 * 4096), ("relative", {}, 4 * 4096), ("shaw", {"distance": 8}, 9)]
)
def test_terms_by_distance_have_no_number_for_each_score(kind: str, options: dict[str, Any], allowed: int) -> None:
    entry, q = POSITIONS.get(kind), drawn(1, 4, 4096, 8)
    if kind == "shaw":
        options, allowed = {**options, "values": False}, allowed * 4 * 4096
    position = ready(entry.part(entry.part.Config(**options), dims(length=4096), 4, 8))
    mask = AttentionMask(4096, 4096, True)
    if position.adds_bias:
        mask = mask.with_relative_bias(position)
    else:
        pairs = Pairs(4096, 4096, causal=True)
        mask = AttentionMask(4096, 4096, True, position_terms=PositionTerms(position, pairs))
    with _Largest() as largest:
        ScoreTerms.of(q, q, mask)
    assert largest.numbers <= allowed


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("documents", [None, numbered(90, 210)], ids=["one", "packed"])
@pytest.mark.parametrize("kind", ["relative", "pair", "alibi"])
def test_fused_block_sparse_equals_gather(kind: str, documents: Tensor | None) -> None:
    packed = None if documents is None else documents.cuda()
    around: dict[str, Any] = {"query_documents": packed, "key_documents": packed}
    numbers = drawn(4, 599).float().cuda().requires_grad_()
    bias = drawn(1, 4, 300, 300).float().cuda().requires_grad_()
    added: dict[str, Any] = (
        {"bias": bias} if kind == "pair" else {"relative_bias": lambda after: numbers[:, (after + 299).clamp(0, 598)]}
    )
    if kind == "alibi":
        added = {"relative_bias": lambda after: -numbers[:, :1] * after.abs(), "linear_bias": True}
    results = []
    for implementation in ("flex", "gather"):
        core = core_of(BigBirdPattern.Config(), implementation=implementation, soft_cap=3.0)
        qkv = [torch.cat((x, x), -1).float().cuda().requires_grad_() for x in (y.detach() for y in inputs(300, 300))]
        out = core(*qkv, AttentionMask(300, 300, True, **added, **around))
        wanted = (*qkv, bias if kind == "pair" else numbers)
        results.append([out, *torch.autograd.grad(out, wanted, drawn(*out.shape, seed=5).float().cuda())])
    for by_flex, gather in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, gather, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("position", ["relative", "alibi", "shaw", "music_transformer", "transformer_xl", "deberta"])
def test_fused_terms_equal_the_dense_core(position: str) -> None:
    results = []
    for implementation in ("flex", "dense"):
        core = {"kind": "softmax", "implementation": implementation}
        options = {"values": False} if position == "shaw" else {}
        config = decode(
            Attention.Config, {"heads": 2, "kv_heads": 1, "core": core, "position": {"kind": position, **options}}
        )
        mixer = ready(Attention(config, dims())).float().cuda()
        x = drawn(2, 300, 32).float().cuda().requires_grad_()
        tokens = Tokens.from_ids(torch.zeros(2, 300, dtype=torch.long).cuda(), numbered(90, 210).cuda())
        out = mixer(x, tokens)
        above = drawn(*out.shape, seed=5).float().cuda()
        results.append([out, *torch.autograd.grad(out, [x, *mixer.parameters()], above)])
    for by_flex, all_scores in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, all_scores, rtol=1e-2, atol=1e-2)


SHARING = {
    "no position": {},
    "bias by distance": {"position": {"kind": "alibi"}},
    "tables": {"position": {"kind": "shaw", "values": False}},
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("lengths", [(77,), (20, 31, 26)], ids=["one document", "packed"])
def test_blocks_of_a_mask_are_found_once_for_all_layers(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, backward_on_a_cpu: None
) -> None:
    """And not once more where a layer is recomputed in backward."""
    found: list[AttentionMask] = []
    of_mask = KeyBlocks.of_mask
    monkeypatch.setattr(KeyBlocks, "of_mask", lambda mask, device: found.append(mask) or of_mask(mask, device))
    config = {"heads": 4, "core": {"kind": "softmax", "implementation": "flex"}, **SHARING[name]}
    layers = [ready(Attention(decode(Attention.Config, config), dims(length=sum(lengths)))) for _ in range(3)]
    documents = numbered(*lengths) if len(lengths) > 1 else None
    x = drawn(2, sum(lengths), 32).requires_grad_()
    tokens = Tokens.from_ids(torch.zeros(2, sum(lengths), dtype=torch.long), documents)
    y = x
    for layer in layers:
        y = checkpoint(layer, y, tokens, use_reentrant=False)
    y.sum().backward()
    assert len(found) == 1
    # Other tokens have other documents.
    layers[0](x, Tokens.from_ids(tokens.ids, documents))
    assert len(found) == 2
