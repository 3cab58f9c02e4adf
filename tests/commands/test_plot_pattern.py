"""`xscale plot pattern` and `xscale list pattern --tokens`: what they draw and count is what attention computes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xscale.cli.main import main
from xscale.nn.pattern.fixed import Fixed
from xscale.nn.pattern.pattern import pattern_layout
from xscale.nn.pattern.window import Band
from xscale.observe.report.layout_text import SHADES, caption, distinct_heads, text

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["xscale", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert (stopped.value.code or 0) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return call


def test_the_terminal_shows_the_layout(run: Run) -> None:
    shown = run("plot", "pattern", "fixed", "heads=split", "--tokens", "512", "--heads", "4")
    layout = pattern_layout(Fixed.Config(heads="split"), 512, 4, causal=True)
    pictures = [block.splitlines() for block in shown.strip().split("\n\n")]
    # Spans of 4 of 8 blocks: 20 of 36 block pairs; the diagonal and two global columns: 12.
    said = [f"fixed: heads {heads}% of the causal blocks" for heads in ("0, 2: 55.6", "1, 3: 33.3")]
    assert [head for head, *_ in pictures] == said
    for (_, *rows), head in zip(pictures, (0, 1), strict=True):
        assert (np.array([[mark == "#" for mark in row] for row in rows]) == layout[head]).all()


def test_both_ways_other_blocks_and_layers(run: Run) -> None:
    shown = run("plot", "pattern", "dilated", "dilation_growth=1", "--both", "--tokens=64", "--block=8", "--layers=2")
    first, second = shown.strip().split("\n\n")
    assert first.splitlines()[1] == "#.#.#..."
    assert second.splitlines()[1] == "#..#..#."


def test_a_long_layout_is_shaded() -> None:
    layout = pattern_layout(Band.Config(left=127, right=127), 128 * 64, 1, causal=False)
    rows = text(layout[0], 32).splitlines()
    assert len(rows) == 32
    assert {len(row) for row in rows} == {32}
    # Far from the diagonal there is nothing, on it everything, beside it something.
    assert rows[0][0] == SHADES[-1]
    assert rows[0][1] not in (SHADES[0], SHADES[-1])
    assert rows[0][9] == SHADES[0]
    assert caption(layout[0], [0], 1) == f"{layout.mean():.1%} of the blocks"
    assert len(distinct_heads(layout.repeat(3, 0))) == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_file_is_written(ending: str, run: Run, tmp_path: Path) -> None:
    target = tmp_path / f"layout.{ending}"
    assert run("plot", "pattern", "bigbird", "--tokens=1024", "--out", str(target)).strip() == str(target)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert target.read_bytes().startswith(start)
    if ending == "svg":
        assert "of the causal blocks" in target.read_text() or "<!-- bigbird -->" in target.read_text()


def test_a_runs_layers_are_drawn(run: Run, tmp_path: Path) -> None:
    shown = run("plot", "pattern", str(ROOT / "configs/run/quickstart.yaml"), "--tokens", "512")
    assert "stack.blocks.1.mixer.part: " in shown
    assert "\n...#...####" in shown
    words = ("plot", "pattern", str(ROOT / "configs/run/quickstart.yaml"), "model.stack.block.mixer.core=softmax")
    assert "no attention layer of this model has a block layout" in run(*words, "model.stack.rules=[]", status=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["widnow"], "Did you mean 'window'?"),
        (["window", "window=4"], "Take 5."),
        (["window", "wndow=5"], "Did you mean 'window'?"),
        (["window", "5"], "key=value"),
        (["window", "--tokens=0"], "--tokens: must be at least 1, got 0"),
        (["window", "--out=a.jpeg"], "Use .png, .svg, .pdf."),
        (["nowhere.yaml"], "nowhere.yaml: there is no such file"),
    ],
)
def test_what_cannot_be_drawn_is_said(words: list[str], said: str, run: Run) -> None:
    assert said in run("plot", "pattern", *words, status=2)


def test_list_says_how_dense_a_pattern_is(run: Run) -> None:
    assert "density 9.09% causal, density 7.67% bidirectional; layout built in" in run(
        "list", "pattern", "--tokens", "4096"
    )
    rows = {row["name"]: row for row in json.loads(run("list", "pattern", "--tokens", "4096", "--json"))}
    assert rows["band"]["density_both_ways"] == pytest.approx((64 * 5 - 6) / 64**2, abs=1e-6)
    assert "density_causal" not in rows["star"]
    assert "only patterns have a density" in run("list", "core", "--tokens", "4096", status=2)
    assert "layout built in" not in run("list", "pattern")
