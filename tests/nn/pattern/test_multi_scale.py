"""Multi-scale windows: the number of heads of each scale by the paper's softmax, and which token each head sees."""

import math
from typing import Any

import numpy as np
import pytest

from tests.conformance.made import dims
from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.multi_scale import MultiScale, head_scales

SCALES = (1, 3, 16, 32, 64)


def literal_shares(scales: int, alpha: float, layer: int) -> list[float]:
    """softmax(z^l) of layer l, from 1: the last logit is 0, each one before it is larger by alpha / l."""
    logits = [0.0]
    for _ in range(scales - 1):
        logits.insert(0, logits[0] + alpha / layer)
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("layer", [1, 2, 12])
def test_heads_are_shared_out_by_the_papers_softmax(alpha: float, layer: int) -> None:
    for heads in (5, 8, 10, 64):
        given = head_scales(SCALES, alpha, layer - 1, heads)
        for scale, share in zip(SCALES, literal_shares(len(SCALES), alpha, layer), strict=True):
            assert abs(given.count(scale) - heads * share) < 1, (scale, given)
        assert len(given) == heads


def test_low_layers_prefer_small_scales() -> None:
    windows = [sum(head_scales(SCALES, 2.0, layer, 20)) for layer in range(6)]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]
    assert head_scales(SCALES, 2.0, 0, 20).count(1) > head_scales(SCALES, 2.0, 5, 20).count(1)
    uniform = head_scales(SCALES, 0.0, 0, 10)
    assert [uniform.count(scale) for scale in SCALES] == [2] * 5
    assert head_scales(SCALES, 1000.0, 0, 3) == (1, 1, 1), "no exponential overflows"


def test_a_heads_scale_does_not_depend_on_those_behind_it() -> None:
    whole = head_scales(SCALES, 0.5, 1, 24)
    assert all(head_scales(SCALES, 0.5, 1, heads) == whole[:heads] for heads in range(24))


def by_token(config: Any, length: int, block: int, **changes: Any) -> Any:
    grid = Grid(**{"blocks": length // block, "heads": 6, "causal": False, "block": block, **changes})
    token, seen = np.arange(length), np.zeros((grid.heads, length, length), dtype=bool)
    for layout, rule in MultiScale(config).masked_layouts(grid):
        assert rule is not None
        seen |= layout.repeat(block, 1).repeat(block, 2) & rule(token[:, None], token[None])
    return seen


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_head_sees_half_its_scale_on_either_side(block: int, layer: int) -> None:
    config = MultiScale.Config(scales=(1, 3, 16, 21), alpha=1.0)
    seen, token = by_token(config, 64, block, layer=layer), np.arange(64)
    for head, scale in enumerate(head_scales(config.scales, 1.0, layer, 6)):
        assert (seen[head] == (abs(token[:, None] - token) <= scale / 2)).all()
    last = by_token(config, 64, block, layer=layer, heads=2, first_head=4)
    assert (last == seen[4:]).all(), "heads of another rank"
    causal = by_token(config, 64, block, layer=layer, causal=True)
    assert (np.tril(causal) == np.tril(seen)).all()


@pytest.mark.parametrize(("scales", "taken"), [((3, 1, 16), "[1, 3, 16]"), ((1, 3, 3), "[1, 3]")])
def test_scales_that_do_not_ascend_are_refused(scales: tuple[int, ...], taken: str) -> None:
    (problem,) = MultiScale.check(MultiScale.Config(scales=scales), dims(), "core.pattern")
    assert str(problem).startswith("core.pattern.scales: must ascend")
    assert str(problem).endswith(f"Take {taken}.")
