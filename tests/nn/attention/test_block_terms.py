"""Terms of relative positions in block-sparse attention, against attention that keeps all scores."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops import block_terms, gathered
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.table_products import RowSlice
from xscale.nn.mixer.attention import Attention
from xscale.nn.module import Module, substitute
from xscale.nn.pattern.bigbird import BigBirdPattern
from xscale.nn.pattern.window import Window
from xscale.nn.position.distance_tables import DistanceTables
from xscale.nn.position.pairs import Pairs, PositionPairs
from xscale.nn.position.position import POSITIONS, Position, PositionTerms
from xscale.nn.tokens import Tokens

HEADS, WIDTH, BLOCK, LENGTH = 4, 8, 4, 30
POSITIONS_WITH_TERMS: dict[str, dict[str, Any]] = {
    "shaw": {"distance": 5},
    "music_transformer": {},
    "transformer_xl": {},
}
PATTERNS = {"window": Window.Config(window=9), "bigbird": BigBirdPattern.Config(random_blocks=1)}


def position_of(kind: str, causal: bool) -> Any:
    part = POSITIONS.get(kind).part
    return ready(part(decode(part.Config, POSITIONS_WITH_TERMS[kind]), dims(causal=causal), HEADS, WIDTH))


def literal(core: BlockSparse, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """All scores, of the blocks of the pattern alone."""
    terms = mask.position_terms
    assert terms is not None
    blocks = (
        torch.from_numpy(core.block_layout(mask.keys, HEADS)).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    )
    seen = blocks[None, :, : mask.queries, : mask.keys]
    if mask.allowed is not None:
        seen = seen & mask.allowed
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5 + terms.scores(q, k)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = weights @ v
    return out + terms.values(weights) if terms.adds_values else out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", POSITIONS_WITH_TERMS)
@pytest.mark.sampled(2)
def test_terms_of_a_position(kind: str, pattern: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, with packed documents and grouped keys, in several chunks."""
    monkeypatch.setattr(gathered, "CHUNK_SCORES", 8 * BLOCK * BLOCK)
    core = CORES.build(BlockSparse.Config(pattern=PATTERNS[pattern], block=BLOCK), dims(causal=causal), HEADS, WIDTH)
    position, documents = position_of(kind, causal), numbered(17, 13)
    inputs = [drawn(2, heads, LENGTH, WIDTH, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
    terms = PositionTerms(position, Pairs(LENGTH, LENGTH, causal=causal))
    packed = {"query_documents": documents, "key_documents": documents}
    mask = AttentionMask(LENGTH, LENGTH, causal, position_terms=terms, **packed)
    above, leaves = drawn(2, HEADS, LENGTH, WIDTH, seed=9), [*inputs, *position.parameters()]
    results = []
    for out in (core(*inputs, mask), literal(core, *inputs, mask)):
        results.append([out, *torch.autograd.grad(out, leaves, above, allow_unused=True, materialize_grads=True)])
    assert all(map(close, *results))
    assert all(gradient.any() for gradient in results[0][: len(inputs) + 1])


class AllTables(Position):
    """Has every table of `DistanceTables`, with one row for all distances from `far` on."""

    adds_scores = True
    adds_values = True
    has_tables = True
    far = 7

    def __init__(self, heads: int) -> None:
        Module.__init__(self)
        rows = (heads, 2 * self.far + 1, WIDTH)
        shapes = {"query_rows": rows, "key_rows": rows, "bias": rows[:2], "value_rows": (1, *rows[1:])}
        shapes |= {"content_bias": (HEADS, WIDTH), "position_bias": (heads, WIDTH)}
        self.tables = torch.nn.ParameterDict(
            {name: drawn(*shape, seed=30 + at) for at, (name, shape) in enumerate(shapes.items())}
        )

    @property
    def reach(self) -> int:
        return self.far

    def distance_tables(self, q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        index = distances.clamp(-self.far, self.far) + self.far
        rows = 2 * self.far + 1
        return DistanceTables(
            **{
                name: table.index_select(1, index) if table.shape[1] == rows else table
                for name, table in self.tables.items()
            }
        )


def with_every_table(part: AllTables, core: BlockSparse, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The equation of `DistanceTables` for all pairs of the pattern's blocks, the cap before its terms."""
    place, d = torch.arange(LENGTH), WIDTH**-0.5
    index = (place - place[:, None]).clamp(-part.far, part.far) + part.far  # [T, S]
    e, f, b, w = (part.tables[name][:, index] for name in ("query_rows", "key_rows", "bias", "value_rows"))
    content_bias, position_bias = part.tables["content_bias"], part.tables["position_bias"]
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = d * q @ k.mT
    if core.config.soft_cap is not None:
        scores = core.config.soft_cap * torch.tanh(scores / core.config.soft_cap)
    scores = scores + d * torch.einsum("hc,bhjc->bhj", content_bias, k)[:, :, None]
    scores = scores + d * torch.einsum("bhic,hijc->bhij", q + position_bias[:, None], e.expand(HEADS, -1, -1, -1))
    scores = scores + d * torch.einsum("bhjc,hijc->bhij", k, f.expand(HEADS, -1, -1, -1)) + b + bias
    blocks = torch.from_numpy(core.block_layout(LENGTH, HEADS).copy())
    seen = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None, :, :LENGTH, :LENGTH]
    weights = scores.masked_fill(~(seen & (place[:, None] >= place)), float("-inf")).softmax(-1)
    return weights @ v + torch.einsum("bhij,hijc->bhic", weights, w.expand(HEADS, -1, -1, -1))


@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(2)
def test_all_terms_at_once(
    pattern: str, cap: float | None, heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients of all tables, with a bias by pair, or none, in chunks of several heads and of few units."""
    config = BlockSparse.Config(pattern=PATTERNS[pattern], block=BLOCK, soft_cap=cap, implementation="gather")
    part, bias = AllTables(heads), drawn(1, HEADS, LENGTH, LENGTH, seed=8)
    inputs = [drawn(2, count, LENGTH, WIDTH, seed=seed).requires_grad_() for seed, count in enumerate((4, 2, 2))]
    terms, above = PositionTerms(part, Pairs(LENGTH, LENGTH, causal=True)), drawn(2, HEADS, LENGTH, WIDTH, seed=9)
    leaves = [*inputs, *part.parameters()]
    monkeypatch.setattr(block_terms, "KEY_TILE", 2)
    for added in (bias, torch.zeros_like(bias)):
        core = CORES.build(config, dims(), HEADS, WIDTH)
        wanted = with_every_table(part, core, *inputs, added)
        gradients = torch.autograd.grad(wanted, leaves, above)
        mask = AttentionMask(LENGTH, LENGTH, True, position_terms=terms, bias=added if added.any() else None)
        for scores in (5, 1000):
            with monkeypatch.context() as context:
                context.setattr(gathered, "CHUNK_SCORES", scores * BLOCK * BLOCK)
                context.setattr(gathered, "CHUNK_SCORES_CUDA", scores * BLOCK * BLOCK)
                context.setattr(Tensor, "is_cuda", device != "cpu")
                out = core(*inputs, mask)
                results = torch.autograd.grad(out, leaves, above)
            assert close(out, wanted)
            assert all(map(close, results, gradients))


def test_rows_beyond_a_table_are_its_last() -> None:
    table, count, width = drawn(1, 5, WIDTH)[0], 5, 4
    for first in range(-9, 9):
        part = RowSlice.of(first, width, count)
        rows = torch.full((width, WIDTH), torch.nan, dtype=table.dtype)
        rows[part.columns] = table[part.rows]
        for columns, row, column in part.repeats:
            assert torch.equal(rows[column], table[row])
            rows[columns] = table[row]
        assert torch.equal(rows, table[(first + torch.arange(width)).clamp(0, count - 1)])


def test_a_window_asks_for_its_own_distances_alone() -> None:
    """Not for those of the whole sequence, whose rows of every head would be made and get gradients."""
    asked, position = [], position_of("music_transformer", True)
    core = CORES.build(BlockSparse.Config(pattern=Window.Config(window=5), block=BLOCK), dims(), HEADS, WIDTH)
    q, k, v = (drawn(2, heads, LENGTH, WIDTH, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    tables = position.distance_tables

    def record(q: Tensor, distances: Tensor, pairs: Pairs) -> DistanceTables:
        asked.append(distances)
        return tables(q, distances, pairs)

    position.distance_tables = record
    core(q, k, v, AttentionMask(LENGTH, LENGTH, True, position_terms=terms_of(position, 0, LENGTH)))
    (distances,) = asked
    assert distances.tolist() == list(range(-(3 * BLOCK - 1), BLOCK))


@pytest.mark.parametrize("causal", [True, False])
def test_terms_of_queries_and_of_keys(causal: bool) -> None:
    """DeBERTa's projections of positions are those of the mixer's queries and keys."""
    position = {"kind": "deberta", "buckets": 8, "distance": 16}
    core = {"kind": "block_sparse", "block": BLOCK, "pattern": {"kind": "window", "window": 9}}
    mixer = ready(
        Attention(decode(Attention.Config, {"heads": HEADS, "position": position, "core": core}), dims(causal=causal))
    )
    documents, above = numbered(17, 13), drawn(2, LENGTH, mixer.o.weight.shape[0], seed=9)
    x, tokens = (
        drawn(2, LENGTH, above.shape[2]).requires_grad_(),
        Tokens.from_ids(torch.zeros_like(documents), documents),
    )
    results = []
    for attend in (mixer.attend, lambda *inputs: literal(mixer.core, *inputs)):
        substitute(mixer, "attend", attend)
        out = mixer(x, tokens)
        results.append([out, *torch.autograd.grad(out, [x, *mixer.parameters()], above)])
    assert all(map(close, *results))


def test_decoding_reads_the_same_rows() -> None:
    core = CORES.build(BlockSparse.Config(pattern=PATTERNS["window"], block=BLOCK), dims(), HEADS, WIDTH)
    position = position_of("shaw", True)
    q, k, v = (drawn(2, heads, LENGTH, WIDTH, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    whole = core(q, k, v, AttentionMask(LENGTH, LENGTH, True, position_terms=terms_of(position, 0, LENGTH)))
    for first, last in ((0, 1), (6, 7), (8, 9), (9, 22)):
        mask = AttentionMask(last - first, last, True, offset=first, position_terms=terms_of(position, first, last))
        some = core(q[:, :, first:last], k[:, :, :last], v[:, :, :last], mask)
        assert close(some, whole[:, :, first:last])


def terms_of(position: Any, first: int, last: int) -> PositionTerms:
    return PositionTerms(position, Pairs(last - first, last, offset=first, causal=True))


@pytest.mark.parametrize("kind", POSITIONS_WITH_TERMS)
def test_half_precision_as_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are in half precision there, and the tables' rows in float32."""
    config = BlockSparse.Config(pattern=PATTERNS["window"], block=BLOCK, implementation="gather")
    core = CORES.build(config, dims(), HEADS, WIDTH)
    position, above = position_of(kind, True).float(), drawn(2, HEADS, LENGTH, WIDTH, seed=9)
    numbers = [drawn(2, heads, LENGTH, WIDTH, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in numbers]
        monkeypatch.setattr(Tensor, "is_cuda", dtype is torch.bfloat16)
        out = core(*inputs, AttentionMask(LENGTH, LENGTH, True, position_terms=terms_of(position, 0, LENGTH)))
        results.append([out, *torch.autograd.grad(out, [*inputs, *position.parameters()], above.to(dtype))])
        position = position.double()
    for half, exact in zip(*results, strict=True):
        assert (half.double() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("kind", POSITIONS_WITH_TERMS)
def test_a_gpu_makes_no_table_of_all_distances(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FlexAttention takes terms of few distances, and Shaw's without those of the values."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    core = CORES.build(BlockSparse.Config(pattern=PATTERNS["window"], block=BLOCK), dims(), HEADS, 64)
    q, part = torch.zeros(1, HEADS, LENGTH, 64), POSITIONS.get(kind).part

    def choice(config: dict[str, Any]) -> str:
        position = part(decode(part.Config, config), dims(), HEADS, 64)
        mask = AttentionMask(LENGTH, LENGTH, True, position_terms=terms_of(position, 0, LENGTH))
        return core._implementation(q, mask, 0.0, core._grid(mask, HEADS, 0))

    with caplog.at_level(logging.INFO, logger="xscale_kernels"):
        assert choice(POSITIONS_WITH_TERMS[kind]) == "gather"
    (line,) = caplog.messages
    assert line.startswith(
        "attention of the core block_sparse: gather (first usable; kernel refused: it takes no terms of a position; "
    )
    few = "it takes terms of the scores by distance, and no others"
    many = "its tables of all distances would grow with the square of the length"
    assert line.endswith(f"; flex refused: {few if kind == 'shaw' else many})")
    if kind == "shaw":
        assert choice({"distance": 5, "values": False}) == "flex"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_named_flex_is_refused_for_terms_of_all_scores(dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    """Pairs whose distances are no differences of indices have no tables."""
    q, k, v = (drawn(2, HEADS, LENGTH, WIDTH, seed=seed) for seed in range(3))
    pairs = PositionPairs.of(Pairs(LENGTH, LENGTH), numbered(*[1] * LENGTH), numbered(*[1] * LENGTH), LENGTH)
    mask = AttentionMask(
        LENGTH, LENGTH, False, dropout=dropout, position_terms=PositionTerms(position_of("shaw", False), pairs)
    )

    def run(implementation: str) -> Tensor:
        config = BlockSparse.Config(pattern=PATTERNS["window"], block=BLOCK, implementation=implementation)
        return CORES.build(config, dims(causal=False), HEADS, WIDTH)(q, k, v, mask)

    with pytest.raises(ConfigError, match="flex does not support this call: it takes terms of the scores by distance"):
        run("flex")
    with caplog.at_level(logging.INFO, logger="xscale_kernels"):
        run("gather")
    assert caplog.messages == [
        "attention of the core block_sparse: all scores (first usable; gather refused: it takes terms of the output by "
        "distance, and no others)"
    ]


@pytest.mark.parametrize(("core", "instead"), [("block_sparse", "gather"), ("softmax", "dense")])
def test_a_named_flex_is_refused_before_the_run(core: str, instead: str) -> None:
    """Whatever the device, and though training with dropout would never take it."""

    def problems(**position: Any) -> list[Any]:
        section = {"heads": HEADS, "dropout": 0.1, "core": {"kind": core, "implementation": "flex"}}
        return Attention.check(decode(Attention.Config, {**section, "position": position}), dims(), "mixer")

    (problem,) = problems(kind="shaw")
    assert problem.path == "mixer.core.implementation"
    assert "position 'shaw' adds others" in problem.what
    assert problem.advice == f"Take auto or {instead}."
    for position in ({"kind": "shaw", "values": False}, {"kind": "transformer_xl"}, {"kind": "relative"}):
        assert problems(**position) == []
