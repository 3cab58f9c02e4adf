"""Context parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.made import core, dims, numbered, qkv, ready, run, tokens
from tests.distributed import Pool, distributed
from tests.parallel.against_one import DOUBLE, Found, alone, compare, same, trained
from tests.parallel.models import DENSE, SPARSE, changed
from tests.train.test_layouts import one_rank
from tests.train.test_layouts import same as same_run
from tests.train.tiny import recipe
from xscale.core.errors import ConfigError
from xscale.nn.attention import softmax
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops import relative_blocks
from xscale.nn.mixer.attention import Attention
from xscale.parallel.context import STYLES
from xscale.parallel.context.mask import ShardedAttentionMask, ShardedMaskBuilder
from xscale.parallel.context.ring import ring
from xscale.parallel.context.sequence_sharding import SequenceSharding, shard_tokens


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process."""
    return alone(pool, DENSE)


@pytest.fixture(scope="module")
def mixture(pool: Pool) -> Found:
    """A mixture of experts on one process, with patterns."""
    return alone(pool, SPARSE)


def layout(style: str = "auto", **others: Any) -> dict[str, Any]:
    """Section `parallel`."""
    mesh = {"cp": 2, **others.pop("mesh", {})}
    return {"mesh": mesh, "context": {"style": style}, **others}


@pytest.mark.parametrize("style", [pytest.param("ring", marks=pytest.mark.long), "ulysses"])
def test_four_ranks_of_one_sequence(style: str, dense: Found, pool: Pool) -> None:
    same(pool, dense, 4, DENSE, layout(style, mesh={"cp": 4}))


@pytest.mark.long
def test_patterns_by_heads(mixture: Found, pool: Pool) -> None:
    same(pool, mixture, 4, SPARSE, layout("ulysses", mesh={"tp": 2, "ep": 2}))


DROPPED_BLOCKS = {"kind": "attention", "heads": 4, "dropout": 0.1, "core": {"kind": "block_sparse"}}


def of_core(core: dict[str, Any]) -> dict[str, Any]:
    """A decoder with two kv_heads around a core."""
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": core}
    stack = {"depth": 2, "block": {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}}
    return {"kind": "decoder", "width": 32, "stack": stack}


@pytest.mark.parametrize(
    ("style", "core"),
    [
        ("scan", {"kind": "linear"}),
        ("scan", {"kind": "delta", "nu": 2}),
        ("halo", {"kind": "block_sparse", "block": 2, "pattern": {"kind": "window", "window": 5}}),
        pytest.param(
            "halo", {"kind": "block_sparse", "block": 4, "pattern": {"kind": "bigbird"}}, marks=pytest.mark.long
        ),
    ],
    ids=["scan", "scan-delta", "halo-window", "halo-bigbird"],
)
@pytest.mark.sampled(2)
def test_a_style_of_its_own(style: str, core: dict[str, Any], pool: Pool) -> None:
    model = of_core(core)
    one = alone(pool, model)
    same(pool, one, 2, model, layout(style))
    same(pool, one, 4, model, layout(style, mesh={"cp": 4}))
    same(pool, one, 4, model, layout(style, mesh={"tp": 2}, zero={"stage": 3}))


@pytest.mark.long
@pytest.mark.parametrize(("style", "position"), [("halo", "relative"), ("ulysses", "alibi")])
def test_patterns_with_a_bias_by_distance(style: str, position: str, pool: Pool) -> None:
    model = of_core({"kind": "block_sparse", "block": 2, "pattern": {"kind": "window", "window": 5}})
    model["position"] = {"kind": position}
    same(pool, alone(pool, model), 4, model, layout(style, mesh={"tp": 2}))


@pytest.mark.parametrize("position", ["relative", "gaussian"])
def test_a_rank_of_padding_reduces_the_gradient_of_a_learned_position(position: str, pool: Pool) -> None:
    """Six tokens, two for each of three ranks: the fourth has none, and computes no scores."""
    model = of_core({"kind": "block_sparse", "block": 2, "pattern": {"kind": "window", "window": 5}})
    model["position"] = {"kind": position}
    short = {"data": {"sequence_length": 6}}
    same(pool, alone(pool, model, **short), 4, model, layout("halo", mesh={"cp": 4}), **short)


RING_POSITIONS: dict[str, dict[str, Any]] = {
    "shaw": {"kind": "shaw", "distance": 5},
    "relative": {"kind": "relative"},
    "gaussian": {"kind": "gaussian"},
    "music_transformer": {"kind": "music_transformer"},
    "transformer_xl": {"kind": "transformer_xl"},
    "tupe": {"kind": "tupe"},
    "deberta": {"kind": "deberta", "buckets": 8, "distance": 16, "norm": {"kind": "layer"}, "shared": True},
}


def trained_in_small_tiles(*args: Any, **sections: Any) -> Found:
    """Train with several tiles in each chunk of the sequence."""
    with patch.object(ring, "TILE", 3):
        return trained(*args, **sections)


def of_position(position: str, *, causal: bool = True) -> dict[str, Any]:
    """A decoder or encoder with a position that adds to the scores."""
    model = {**of_core({"kind": "softmax"}), "position": RING_POSITIONS[position]}
    return model if causal else {**model, "kind": "encoder"}


def test_the_ring_adds_the_terms_of_relative_positions(pool: Pool) -> None:
    """Shaw's tables are whole on each rank, and their gradients are summed over the ranks' queries."""
    one = alone(pool, of_position("shaw"), steps=2)
    compare(one, pool.run(trained_in_small_tiles, 2, of_position("shaw"), layout("ring"), steps=2))


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("position", RING_POSITIONS)
def test_the_ring_adds_the_terms_of_a_position_by_tiles(position: str, causal: bool, pool: Pool) -> None:
    model = of_position(position, causal=causal)
    one = alone(pool, model, steps=2)
    compare(one, pool.run(trained_in_small_tiles, 2, model, layout("ring"), steps=2))
    same(pool, one, 4, model, layout("ring", mesh={"tp": 2}, recompute={"every": 1}, zero={"stage": 3}), steps=2)


def trained_by_blocks(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> Found:
    """Train with relative positions a few queries at a time, as long sequences do. The ring has tiles of its own."""
    attend = Mock(side_effect=partial(relative_blocks.relative_attention, block=5))
    with (
        patch.multiple(relative_blocks, LEAST_SCORES=1, CHUNK=7),
        patch.object(softmax, "relative_attention", attend),
    ):
        found = trained(model, parallel, **sections)
    assert attend.called == (parallel.get("context") != {"style": "ring"})
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("position", "causal"), [("shaw", False), ("relative", True), ("transformer_xl", True), ("deberta", False)]
)
def test_relative_positions_by_blocks_of_queries(position: str, causal: bool, pool: Pool) -> None:
    """Each rank by blocks equals all scores at once on one process, with heads or the sequence sharded."""
    model = of_position(position, causal=causal)
    one = alone(pool, model, steps=2)
    for parallel in ({"mesh": {"tp": 2}}, layout("ulysses"), layout("ring")):
        compare(one, pool.run(trained_by_blocks, 2, model, parallel, steps=2))


@pytest.mark.long
@distributed(ranks=2)
def test_every_core_gives_its_numbers_in_every_style_it_declares() -> None:
    """Outputs and gradients of a piece are those of the whole, cut: for each core, style, direction and documents."""
    assert dist.group.WORLD is not None
    checked = 0
    for entry in CORES:
        for style in entry.traits.context:
            # The wrong order of the pieces would not show with one style of cutting only.
            spread = SequenceSharding(dist.group.WORLD, balanced=style in ("ring", "ulysses"))
            for causal in (True, False):
                able = entry.traits.causal if causal else entry.traits.bidirectional
                if not able or (style in ("scan", "halo") and not causal):
                    continue
                for packed in (False, True) if entry.traits.documents else (False,):
                    documents = numbered(70, 30, 200) if packed else None
                    same_core(entry, style, spread, causal, documents)
                    checked += 1
    assert checked >= 2 * len([entry for entry in CORES if entry.traits.context])


def same_core(entry: Any, style: Any, spread: SequenceSharding, causal: bool, documents: Tensor | None) -> None:
    """One case."""
    part = core(entry, causal=causal)
    whole = [x.detach().requires_grad_() for x in qkv(groups=2)]
    expected = run(part, *whole, query_documents=documents, key_documents=documents)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    slopes = torch.autograd.grad((expected * weights).sum(), whole)
    piece = shard_tokens(tokens(documents=documents), spread)
    mask = ShardedAttentionMask(
        queries=150,
        keys=150,
        causal=causal,
        query_shard=piece,
        key_shard=piece,
        documents=documents is not None,
        query_documents=piece.documents,
    )
    attend = STYLES[style][1](part)
    held = [_piece(x, spread).detach().requires_grad_() for x in whole]
    torch.manual_seed(0)
    o = attend(*held, mask)
    what = (entry.name, style, causal, documents is not None)
    assert torch.allclose(o, _piece(expected, spread), rtol=1e-9, atol=1e-11), what
    found = torch.autograd.grad((o * _piece(weights, spread)).sum(), held)
    for mine, theirs in zip(found, slopes, strict=True):
        assert torch.allclose(mine, _piece(theirs, spread), rtol=1e-8, atol=1e-10), what


def _piece(x: Tensor, spread: SequenceSharding) -> Tensor:
    """[B, H, T, K] -> [B, H, P, K]."""
    return spread.shard(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("changes", "parallel", "says"),
    [
        ({"mixer": {"kind": "attention", "heads": 3, "head_width": 8}}, layout("ulysses"), "does not divide heads=3"),
        ({"mixer": {"kind": "attention", "heads": 4}}, layout("halo"), "the core supports ring, ulysses"),
        ({"mixer": {"kind": "attention", "heads": 4, "dropout": 0.1}}, layout("ring"), "dropout of attention weights"),
        (
            {"mixer": {"kind": "attention", "heads": 3, "head_width": 8, "dropout": 0.1}},
            layout(),
            "dropout of attention",
        ),
        ({"mixer": DROPPED_BLOCKS}, layout("halo"), "dropout of attention weights"),
    ],
)
def test_what_cannot_be_sharded_is_refused(changes: dict[str, Any], parallel: dict[str, Any], says: str) -> None:
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense"}, **changes}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    problems = recipe(Path("nowhere"), model=model, parallel=parallel).check(2)
    assert any(says in problem.what and problem.advice for problem in problems), problems


@pytest.mark.parametrize(
    ("mixer", "style", "what", "fix"),
    [
        (
            {"heads": 2, "dropout": 0.1},
            "ring",
            "ring: dropout of attention weights draws the mask of all a head's scores, of which no rank has all",
            "Take ulysses.",
        ),
        (
            {"heads": 3, "head_width": 8, "dropout": 0.1},
            "auto",
            "ulysses: cp x tp = 2 does not divide heads=3",
            "Take parallel.mesh.cp=3, or model.stack.block.mixer.dropout=0.0. "
            "The blocks' dropout works with all styles.",
        ),
    ],
    ids=["another style works", "no style works"],
)
def test_a_refused_style_says_what_would_work(mixer: dict[str, Any], style: str, what: str, fix: str) -> None:
    block = {"mixer": {"kind": "attention", **mixer}, "ffn": {"kind": "dense"}}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    [problem] = recipe(Path("nowhere"), model=model, parallel=layout(style)).check(2)
    assert what in problem.what
    assert ("halo: " in problem.what) == (style == "auto"), "the reason of every style that was tried, and no other"
    assert problem.advice == fix


@distributed(ranks=2)
def test_a_core_that_mixes_documents_refuses_them_in_pieces_too() -> None:
    assert dist.group.WORLD is not None
    around = dims()
    attention = ready(Attention(Attention.Config(heads=4, core=CORES.get("moba").part.Config()), around))
    piece = shard_tokens(tokens(documents=numbered(100, 200)), SequenceSharding(dist.group.WORLD))
    with pytest.raises(ConfigError, match="cannot mask packed documents"):
        ShardedMaskBuilder(attention, attention.make_mask)(
            torch.zeros(2, 4, 150, 8), torch.zeros(2, 4, 150, 8), piece, piece
        )


STAGES_OF_TWO_STYLES = {
    "ring and scan": ({"kind": "softmax"}, {"kind": "linear"}),
    "halo and ring": ({"kind": "block_sparse", "block": 4, "pattern": {"kind": "window"}}, {"kind": "softmax"}),
}


@pytest.mark.parametrize("name", STAGES_OF_TWO_STYLES)
def test_stages_of_other_styles_shard_the_sequence_alike(name: str, pool: Pool) -> None:
    """Ring alone takes chunks in zig-zag order; a stage with ring and one without must still agree on the order."""
    mixers = [{"kind": "attention", "heads": 3, "head_width": 8, "core": core} for core in STAGES_OF_TWO_STYLES[name]]
    rule = {"every": 2, "at": 1, "mixer": mixers[1]}
    network = changed(DENSE, stack__depth=2, stack__block__mixer=mixers[0], stack__rules=[rule])
    same(pool, alone(pool, network, steps=1), 4, network, {"mesh": {"pp": 2, "cp": 2}}, steps=1)


def test_auto_finds_a_style_for_heads_that_cp_does_not_divide() -> None:
    block = {"mixer": {"kind": "attention", "heads": 3, "head_width": 8}, "ffn": {"kind": "dense"}}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    assert recipe(Path("nowhere"), model=model, parallel=layout()).check(2) == []


def test_the_trainer_evaluates_writes_and_saves_the_same(tmp_path: Path, pool: Pool) -> None:
    train = {"sample": {"prompts": ("def ",), "tokens": 5}}
    pool.run(one_rank, 1, tmp_path, "one", precision=DOUBLE, train=train)
    pool.run(one_rank, 2, tmp_path, "two", precision=DOUBLE, train=train, parallel=layout())
    same_run(tmp_path, "two", "one", 1e-9)
    assert written(tmp_path / "two") == written(tmp_path / "one") != []


def written(run: Path) -> list[str]:
    """The samples in a run's log."""
    return [line for line in (run / "log.txt").read_text(encoding="utf-8").splitlines() if "def " in line]
