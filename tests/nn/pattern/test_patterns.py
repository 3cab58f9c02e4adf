"""Every pattern: no future, prefixes that stay, the density its trait states; and layouts written out by hand."""

from typing import Any

import numpy as np
import pytest

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.core.requirements import take
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.dims import Dims
from xscale.nn.pattern.axial import Local2d
from xscale.nn.pattern.bigbird import BigBirdPattern
from xscale.nn.pattern.block_local import BlockLocal, Blockwise
from xscale.nn.pattern.fixed import Fixed, Strided
from xscale.nn.pattern.global_blocks import GlobalBlocks, Star
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.longformer import LongformerPattern
from xscale.nn.pattern.pattern import PATTERNS, Layout, pattern_density, pattern_layout
from xscale.nn.pattern.random import RandomPattern, random_columns
from xscale.nn.pattern.union import UnionPattern
from xscale.nn.pattern.variable import Variable
from xscale.nn.pattern.window import Dilated, Window


def names(**traits: bool) -> list[str]:
    return PATTERNS.able(**traits)


def default(name: str) -> Any:
    return PATTERNS.get(name).part.Config()


def make_layout(config: Any, blocks: int, causal: bool, heads: int = 4, layer: int = 0) -> Layout:
    return pattern_layout(config, 64 * blocks, heads, causal, layer)


@pytest.mark.parametrize("blocks", [1, 2, 7, 32])
@pytest.mark.parametrize("name", names(causal=True))
def test_causal_layouts_see_themselves_and_no_future(name: str, blocks: int) -> None:
    layout = make_layout(default(name), blocks, causal=True)
    assert not np.triu(layout, 1).any()
    assert layout[:, np.arange(blocks), np.arange(blocks)].all()


@pytest.mark.parametrize("name", names(causal=True))
def test_causal_layouts_do_not_change_when_the_sequence_grows(name: str) -> None:
    whole = make_layout(default(name), 37, causal=True)
    for blocks in range(1, 37):
        assert (make_layout(default(name), blocks, causal=True) == whole[:, :blocks, :blocks]).all()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("layer", [0, 3])
def test_some_rows_are_rows_of_the_whole(name: str, layer: int) -> None:
    pattern = PATTERNS.build(default(name))
    causal = PATTERNS.get(name).traits.causal
    whole = pattern.layout(Grid(23, heads=4, causal=causal, layer=layer))
    some = pattern.layout(Grid(23, heads=4, causal=causal, layer=layer, first_row=9, row_count=3))
    assert (some == whole[:, 9:12]).all()
    if pattern.differs_by_head:
        late = pattern.layout(Grid(23, heads=2, causal=causal, layer=layer, first_head=2))
        assert (late == whole[2:]).all()


@pytest.mark.parametrize("name", names())
def test_density_is_what_the_trait_says(name: str) -> None:
    traits = PATTERNS.get(name).traits
    config, blocks, heads = default(name), 240, 4
    says = eval(traits.density, {"N": blocks, "block": 64, "max": max, "min": min, "len": len, **config.model_dump()})
    measured = pattern_density(config, 64 * blocks, causal=not traits.bidirectional, heads=heads)
    assert says == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", names())
def test_very_long_sequences_have_a_layout(name: str) -> None:
    config, causal = default(name), PATTERNS.get(name).traits.causal
    assert pattern_layout(config, 131072, 8, causal).shape[1:] == (2048, 2048)


def picture(*rows: str) -> Layout:
    return np.array([[mark == "#" for mark in row] for row in rows])[None]


def test_fixed_drawn_by_hand() -> None:
    wanted = picture("#......", "##.....", "###....", "..##...", "..###..", "..####.", "..#..##")
    assert (make_layout(Fixed.Config(local_blocks=3), 7, causal=True) == wanted).all()
    # Both ways, seven blocks: the last span has one block, which is its global one.
    wanted = picture("###..##", "###..##", "###..##", "..#####", "..#####", "..#####", "..#..##")
    assert (make_layout(Fixed.Config(local_blocks=3), 7, causal=False) == wanted).all()


def fixed_of_the_documentation(
    blocks: int, heads: int, span: int, globals_: int, patterns: int, rows: bool, causal: bool
) -> Layout:
    """DeepSpeed's documented construction, span by span, written from its description."""
    layout = np.zeros((heads, blocks, blocks), dtype=bool)
    for head in range(heads):
        for start in range(0, blocks, span):
            layout[head, start : start + span, start : start + span] = True
        first = span - (1 + head % patterns) * globals_
        whole = blocks - blocks % span
        starts = list(range(first, whole, span))
        if whole < blocks:
            starts.append(min(whole + first, blocks - globals_))
        for start in starts:
            layout[head, start if causal else 0 :, start : start + globals_] = True
            if rows:
                layout[head, start : start + globals_] = True
    return np.tril(layout) if causal else layout


@pytest.mark.parametrize("blocks", [8, 10, 12, 15])
@pytest.mark.parametrize(("globals_", "patterns"), [(1, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize(("causal", "rows"), [(True, False), (False, False), (False, True)])
def test_fixed_is_the_documented_one(blocks: int, globals_: int, patterns: int, causal: bool, rows: bool) -> None:
    config = Fixed.Config(local_blocks=4, global_blocks=globals_, global_patterns=patterns, horizontal_global=rows)
    layout = np.broadcast_to(make_layout(config, blocks, causal), (4, blocks, blocks))
    assert (layout == fixed_of_the_documentation(blocks, 4, 4, globals_, patterns, rows, causal)).all()


def test_longformer_and_window_drawn_by_hand() -> None:
    layout = make_layout(LongformerPattern.Config(global_block_indices=(4,)), 6, causal=False)
    wanted = picture("##..#.", "###.#.", ".####.", "..###.", "######", "....##")
    assert (layout == wanted).all()
    wanted = picture("#...", "##..", ".##.", "..##")
    assert (make_layout(Window.Config(), 4, causal=True) == wanted).all()


def test_strided_drawn_by_hand() -> None:
    wanted = picture("#.....", "##....", "###...", "####..", ".####.", "..####")
    assert (make_layout(Strided.Config(stride=3), 6, causal=True) == wanted).all()
    split = make_layout(Strided.Config(stride=2, heads="split"), 5, causal=True, heads=2)
    assert (split[0] == picture("#....", "##...", "###..", ".###.", "..###")[0]).all(), (
        "a block and the `stride` before it"
    )
    assert (split[1] == picture("#....", ".#...", "#.#..", ".#.#.", "#.#.#")[0]).all()


@pytest.mark.parametrize("causal", [True, False])
def test_bigbird_has_window_globals_and_exactly_as_many_random_blocks(causal: bool) -> None:
    plain = make_layout(BigBirdPattern.Config(random_blocks=0, global_blocks_at_end=0 if causal else 1), 40, causal)
    layout = make_layout(
        BigBirdPattern.Config(random_blocks=3, global_blocks_at_end=0 if causal else 1), 40, causal, heads=6
    )
    assert (layout >= plain).all()
    extra = (layout & ~plain).sum(-1)
    assert (extra[:, 6:-1] == 3).all()
    assert len({head.tobytes() for head in layout}) == 6
    assert (
        make_layout(BigBirdPattern.Config(), 40, causal, layer=1) != make_layout(BigBirdPattern.Config(), 40, causal)
    ).any()


def test_random_columns_are_distinct_and_even() -> None:
    grid = Grid(2000, heads=2, causal=False)
    limit = np.full((2000, 1), 10)
    chosen = random_columns(grid, limit, 4, seed=3)
    assert all(len(set(row)) == 4 for row in chosen.reshape(-1, 4))
    counts = np.bincount(chosen.reshape(-1), minlength=10)
    assert len(counts) == 10
    assert counts.min() > 0.93 * counts.mean()
    few = random_columns(grid, np.full((2000, 1), 2), 4, seed=3)
    assert (np.sort(few.reshape(-1, 4)) == [-1, -1, 0, 1]).all()


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (Window.Config(window=4), "p.window"),
        (Fixed.Config(local_blocks=2, global_blocks=3), "p.global_blocks"),
        (Fixed.Config(horizontal_global=True), "p.horizontal_global"),
        (BigBirdPattern.Config(global_blocks_at_end=1), "p.global_blocks_at_end"),
    ],
)
def test_what_cannot_be_is_refused_by_its_path(config: Any, path: str) -> None:
    dims = Dims(width=8, depth=1, vocabulary=8, length=64, causal=True)
    problems = PATTERNS.of(config).part.check(config, dims, "p")
    assert [problem.path for problem in problems] == [path]
    assert str(ConfigError(problems))


@pytest.mark.parametrize(
    ("kind", "key", "value", "path"),
    [
        ("strided", "stride", 0, "pattern.stride"),
        ("longformer", "global_block_indices", [-1], "pattern.global_block_indices.0"),
        ("global_blocks", "global_block_indices", [-1], "pattern.global_block_indices.0"),
        ("variable", "global_block_indices", [-1], "pattern.global_block_indices.0"),
        ("variable", "local_window_blocks", [], "pattern.local_window_blocks"),
        ("variable", "local_window_blocks", [2, 0], "pattern.local_window_blocks.1"),
        ("blockwise", "shifts", [], "pattern.shifts"),
        ("union", "patterns", [], "pattern.patterns"),
        ("intersection", "patterns", [], "pattern.patterns"),
        ("band", "left", -1, "pattern.left"),
    ],
)
def test_values_out_of_bounds_are_refused_by_their_path(kind: str, key: str, value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(BlockSparse.Config, {"pattern": {"kind": kind, key: value}})
    assert [problem.path for problem in error.value.problems] == [path]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"kind": "hub", "places": [2], "rows": False},
            GlobalBlocks.Config(global_block_indices=(2,), horizontal_global=False),
        ),
        ({"kind": "fixed", "span": 8, "global_rows": True}, Fixed.Config(local_blocks=8, horizontal_global=True)),
        (
            {"kind": "variable", "spans": [3], "global_blocks": [1], "global_ends": [4]},
            Variable.Config(local_window_blocks=(3,), global_block_indices=(1,), global_block_end_indices=(4,)),
        ),
        (
            {"kind": "union", "parts": [{"kind": "neighbours", "side": 3}, {"kind": "random", "count": 2}]},
            UnionPattern.Config(patterns=(Local2d.Config(kernel_size=3), RandomPattern.Config(random_blocks=2))),
        ),
    ],
)
def test_old_keys_are_read_with_a_warning(old: dict[str, Any], new: Any) -> None:
    with pytest.warns(RenamedWarning):
        assert decode(BlockSparse.Config, {"pattern": old}).pattern == new


def test_dilated_drawn_by_hand() -> None:
    layout = make_layout(Dilated.Config(window=3, dilation=2, dilated_heads=1), 5, causal=False, heads=2)
    assert (layout[0] == picture("#.#..", ".#.#.", "#.#.#", ".#.#.", "..#.#")[0]).all()
    assert (layout[1] == picture("##...", "###..", ".###.", "..###", "...##")[0]).all()
    deep = make_layout(
        Dilated.Config(window=3, dilation=1, dilation_growth=1, window_growth=1), 8, causal=True, layer=1
    )
    assert (deep[0, 7] == picture("...#.#.#")[0, 0]).all()


def test_star_blockwise_and_overlap_drawn_by_hand() -> None:
    wanted = picture("#####", "###.#", "####.", "#.###", "##.##")
    assert (make_layout(Star.Config(), 5, causal=False) == wanted).all()
    layout = make_layout(Blockwise.Config(sequence_blocks=2, shifts=(0, 1)), 4, causal=False, heads=3)
    assert (layout[0] == picture("##..", "##..", "..##", "..##")[0]).all()
    assert (layout[1] == ~layout[0]).all()
    assert (layout[2] == layout[0]).all()
    wanted = picture("####..", "####..", "######", "######", "..####", "..####")
    assert (make_layout(BlockLocal.Config(local_blocks=2, overlap=1), 6, causal=False) == wanted).all()


def test_random_draws_exactly_its_count() -> None:
    layout = make_layout(RandomPattern.Config(random_blocks=4), 30, causal=False)
    assert (layout.sum(-1) == 4).all()
    causal = make_layout(RandomPattern.Config(random_blocks=4), 30, causal=True)
    assert (causal.sum(-1) == np.minimum(np.arange(30), 4) + 1).all()


@pytest.mark.parametrize("kind", [entry.name for entry in PATTERNS if entry.part.odd_keys])
def test_an_even_window_has_no_middle(kind: str) -> None:
    part = PATTERNS.get(kind).part
    for key in part.odd_keys:
        problems = part.check(part.Config(**{key: 4}), None, "pattern")
        assert [(problem.path, problem.what, problem.choices) for problem in problems] == [
            (f"pattern.{key}", "must be odd and positive, got 4", take(5))
        ]
        assert part.check(part.Config(**{key: 5}), None, "pattern") == []


def test_windows_of_blocks_are_odd() -> None:
    odd = {entry.name: entry.part.odd_keys for entry in PATTERNS if entry.part.odd_keys}
    assert odd == {
        "window": ("window",),
        "dilated": ("window",),
        "bigbird": ("window",),
        "longformer": ("window",),
        "star": ("window",),
        "local_2d": ("kernel_size",),
    }
