"""Statistics of a mixture of experts."""

import pytest
import torch

from tests.nn.moe.mixture import mixture, sample
from xscale.nn.ffn.moe.statistics import load_balance_metrics, load_stats, nonfinite
from xscale.nn.tokens import Stats


def test_observations() -> None:
    x, tokens = sample(stats=Stats())
    moe = mixture(capacity_factor=0.75, router={"kind": "topk", "z_loss_weight": 0.001})
    moe.path = "here"
    moe(x, tokens)
    seen = tokens.forward.stats.means()
    probabilities = (x.flatten(0, 1) @ moe.router.weight.t()).softmax(1)
    load = probabilities.topk(2).indices.flatten().bincount(minlength=4)
    torch.testing.assert_close(seen["here/load"], load.double() / 96)
    assert seen["here/dropped"].item() == pytest.approx(1 - load.clamp(max=18).sum().item() / 96)
    entropy = -(probabilities * probabilities.log()).sum(1).mean()
    assert seen["here/entropy"].item() == pytest.approx(entropy.item(), rel=1e-6)
    assert seen["here/confidence"].item() == pytest.approx(probabilities.amax(1).mean().item(), rel=1e-6)
    assert {"here/aux", "here/z"} < seen.keys()


@pytest.mark.parametrize(("factor", "recorded"), [(0.75, True), (None, False)])
def test_rows_are_recorded_where_a_capacity_makes_them_others_than_the_load(
    factor: float | None, recorded: bool
) -> None:
    x, tokens = sample(stats=Stats())
    moe = mixture(capacity_factor=factor)
    moe.path = "here"
    moe(x, tokens)
    seen = tokens.forward.stats.means()
    assert ("here/rows" in seen) == recorded
    if recorded:
        kept = (seen["here/load"] * 96).clamp(max=18)
        torch.testing.assert_close(seen["here/rows"], kept / kept.sum())
        assert not torch.equal(seen["here/rows"], seen["here/load"]), "nothing was dropped"


def test_evenness() -> None:
    even = load_stats(torch.full((8,), 0.125))
    assert even == {"cv": 0, "p50": 1, "p95": 1, "max": 1, "min": 1, "starved": 0}
    skewed = load_stats(torch.tensor([0.97, 0.01, 0.01, 0.01]))
    assert skewed["max"] == pytest.approx(3.88)
    assert skewed["cv"] == pytest.approx(3 * 0.5543, rel=1e-3)
    assert skewed["starved"] == 3


def test_unevenness_is_told_by_layer() -> None:
    told = load_balance_metrics({"a/load": torch.tensor([0.7, 0.1, 0.1, 0.1]), "a/dropped": torch.tensor(0.1)})
    assert told.keys() == {"a/load_cv", "a/load_p50", "a/load_p95", "a/load_max"}
    assert told["a/load_max"] == pytest.approx(2.8)
    assert told["a/load_p50"] == pytest.approx(0.4)


def test_faulty_names_the_layer() -> None:
    means = {"a/confidence": torch.tensor(float("nan")), "b/confidence": torch.tensor(0.5), "b/load": torch.ones(2)}
    assert nonfinite(means) == ["a"]
