"""Relative positions a block of queries at a time, against all scores at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.nn.attention import softmax
from xscale.nn.attention.ops import relative_blocks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.relative_blocks import relative_attention
from xscale.nn.attention.ops.relative_spans import add_by_columns
from xscale.nn.dims import Dims
from xscale.nn.forward import Forward
from xscale.nn.mixer.attention import Attention
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.tokens import Tokens

POSITIONS = [
    {"kind": "relative", "buckets": 8, "distance": 9},
    {"kind": "gaussian"},
    {"kind": "shaw", "distance": 3},
    {"kind": "shaw", "distance": 40, "values": False},
    {"kind": "music_transformer"},
    {"kind": "transformer_xl"},
    {"kind": "deberta", "buckets": 4, "distance": 8, "norm": {"kind": "layer"}},
    {"kind": "deberta", "buckets": None, "distance": 5},
]
LENGTH, WIDTH = 21, 32
names = pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[AttentionMask]:
    """Attend by blocks of 5 queries whatever the length; the masks of the calls."""
    calls: list[AttentionMask] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *options: Any) -> Tensor:
        calls.append(mask)
        out: Tensor = relative_attention(q, k, v, mask, *options, block=5)
        return out

    monkeypatch.setattr(relative_blocks, "LEAST_SCORES", 2)
    monkeypatch.setattr(softmax, "relative_attention", attend)
    monkeypatch.setattr(relative_blocks, "CHUNK", 4)
    return calls


def network(position: dict[str, Any], causal: bool = True, **changes: Any) -> Attention:
    config = decode(Attention.Config, {"heads": 4, "position": position, **changes})
    return ready(Attention(config, dims(causal=causal, length=LENGTH)))


def tokens_of(*lengths: int) -> Tokens:
    documents = numbered(*lengths) if len(lengths) > 1 else None
    return Tokens.from_ids(torch.zeros(2, sum(lengths), dtype=torch.long), documents)


def run(mixer: Attention, *lengths: int) -> list[Tensor]:
    """Output, and gradients of the input and of all parameters."""
    x = drawn(2, sum(lengths), WIDTH).requires_grad_()
    out = mixer(x, tokens_of(*lengths))
    return [out, *torch.autograd.grad((out * drawn(*out.shape, seed=5)).sum(), [x, *mixer.parameters()])]


@names
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocks_equal_all_scores_at_once(
    position: dict[str, Any], causal: bool, blocks: list[AttentionMask], monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, lengths in (({}, (LENGTH,)), ({"kv_heads": 2, "scale": 0.3}, (13,)), ({}, (9, 1, 6))):
        mixer = network(position, causal, **changes)
        by_blocks = run(mixer, *lengths)
        assert len(blocks) == 1
        with monkeypatch.context() as patch:
            patch.setattr(relative_blocks, "LEAST_SCORES", 1 << 30)
            at_once = run(mixer, *lengths)
        assert blocks.pop() is not None
        assert not blocks
        assert all(bool(gradient.any()) for gradient in by_blocks)
        assert all(close(x, y) for x, y in zip(by_blocks, at_once, strict=True))


@names
def test_a_prompt_after_cached_tokens(position: dict[str, Any], blocks: list[AttentionMask]) -> None:
    """More than one query after cached keys: a block's first query is not the first key."""
    mixer, x, cache = network(position), drawn(2, LENGTH, WIDTH), dict[str, Any]()
    parallel = mixer(x, tokens_of(LENGTH))
    for start, end in ((0, 8), (8, LENGTH)):
        tokens = tokens_of(LENGTH)
        part = Tokens(tokens.ids[:, start:end], tokens.positions[:, start:end], forward=Forward(cache=cache))
        assert close(mixer(x[:, start:end], part), parallel[:, start:end])
    assert [mask.offset for mask in blocks] == [0, 0, 8]


@pytest.mark.parametrize("rows", [8, 6])
def test_a_sum_by_columns_is_exact(rows: int) -> None:
    """Views are strided, as in a block; 6 rows are not a multiple of those of the identity matrix."""
    sums, x = drawn(rows, 9)[:, :5], drawn(7, rows + 2, seed=1)[:5, :rows].T
    expected = sums + x
    add_by_columns(sums, x, torch.eye(4, dtype=x.dtype))
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("reach", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_differences(causal: bool, reach: int | None) -> None:
    """All tables at once, those of the heads and shared ones, with documents."""
    length, last = 6, reach or 5
    shapes = [(2, 11, 3), (1, 11, 3), (2, 11), (1, 11, 3), (1, 3), (2, 3)]
    tables = [drawn(*shape, seed=number).requires_grad_() for number, shape in enumerate(shapes)]
    q, k, v = (drawn(1, heads, length, 3, seed=heads).requires_grad_() for heads in (2, 1, 1))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1]])
    mask = AttentionMask(length, length, causal, query_documents=documents, key_documents=documents)

    def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        def tables_of(distances: Tensor) -> DistanceTables:
            rows = distances.clamp(-last, last) + 5
            return DistanceTables(*(table.index_select(1, rows) for table in tables[:4]), *tables[4:])

        return relative_attention(q, k, v, mask, tables_of, reach, block=4)

    assert torch.autograd.gradcheck(attend, (q, k, v, *tables))


@pytest.mark.parametrize(
    "changes",
    [
        {"core": {"kind": "softmax", "soft_cap": 5.0}},
        {"dropout": 0.1},
        {"core": {"kind": "adaptive_span"}},
        {"core": {"kind": "local_transformer"}},
        {"core": {"kind": "disagreement"}},
        {"core": {"kind": "entmax"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["relative", "transformer_xl"])
def test_others_compute_all_scores(kind: str, changes: dict[str, Any], blocks: list[AttentionMask]) -> None:
    mixer = network({"kind": kind}, **changes).train()
    tokens = tokens_of(LENGTH)
    mixer(drawn(2, LENGTH, WIDTH), Tokens(tokens.ids, tokens.positions, forward=Forward(rng_seed=0)))
    # Disagreement reads the bias of T5 by pair, and takes terms of queries as its core, softmax, does.
    assert len(blocks) == (changes.get("core") == {"kind": "disagreement"} and kind == "transformer_xl")
    network({"kind": kind}).bfloat16()(drawn(2, LENGTH, WIDTH).bfloat16(), tokens)
    network({"kind": "alibi"})(drawn(2, LENGTH, WIDTH), tokens)
    assert len(blocks) <= 1, "half precision, and a bias without parameters"


@names
def test_no_scores_are_kept(position: dict[str, Any], blocks: list[AttentionMask]) -> None:
    """The tensors that autograd keeps grow with the length, and have no number for each pair of tokens."""
    sizes = []
    for length in (64, 128):
        around = Dims(width=WIDTH, depth=1, vocabulary=2, length=length, causal=False)
        config = decode(Attention.Config, {"heads": 4, "position": position})
        mixer, kept = ready(Attention(config, around)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            tokens = Tokens.from_ids(torch.zeros(1, length, dtype=torch.long))
            mixer(drawn(1, length, WIDTH), tokens)
        sizes.append(max(kept))
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 4 * 128 * 128
