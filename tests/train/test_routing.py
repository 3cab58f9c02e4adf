"""Statistics of a run's routing, and what it does with a step whose routing is not finite."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.train.test_layouts import routed
from tests.train.tiny import metrics, recipe, run
from xscale.core.errors import FaultError
from xscale.nn.ffn.moe.router.select import LinearScore

PATH = "stack.blocks.1.ffn.part"


def test_metrics_and_tensorboard_tell_how_even_the_load_is(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(recipe(tmp_path, observe={"progress": False, "tensorboard": True, "report": True})) == 0
    (*_, last) = [line for line in metrics(tmp_path) if "loss" in line]
    load = last[f"{PATH}/load"]
    assert last[f"{PATH}/load_max"] == pytest.approx(max(load) * len(load))
    assert {f"{PATH}/{name}" for name in ("load_cv", "load_p50", "load_p95", "dropped", "entropy", "confidence")} < {
        *last
    }
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {f"{PATH}/load_p95", f"{PATH}/load_cv", f"{PATH}/dropped"} < set(events.Tags()["scalars"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "load_p95" in page
    assert "data:image/png" in page, "the heat map of the load over time"


@pytest.mark.long
@pytest.mark.parametrize(("score", "logit"), [("sigmoid", -1e5), ("softmax", float("nan")), ("softmax", float("inf"))])
def test_gates_that_are_zero_or_not_finite_skip_the_step_and_name_the_layer(
    tmp_path: Path, score: str, logit: float
) -> None:
    """Routing is not finite from the third step on; the weights stay those of the second."""
    model = routed({"kind": "topk", "score": score})
    before, whole = LinearScore.logits, {"calls": 0}

    def logits(self: Any, x: torch.Tensor, tokens: Any) -> torch.Tensor:
        found = before(self, x, tokens)
        if not self.router.training:
            return found
        whole["calls"] += 1
        return found if whole["calls"] <= 8 else torch.full_like(found, logit) + 0 * found

    with patch.object(LinearScore, "logits", logits):
        assert run(recipe(tmp_path, model=model, train={"eval_every": 0})) == 0
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["skipped"] for line in steps] == [0, 0, 1, 2, 3, 4]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"with non-finite routing in {PATH}; the step is skipped" in log
    with patch.object(LinearScore, "logits", logits), pytest.raises(FaultError, match=PATH):
        run(recipe(tmp_path, "other", model=model, train={"eval_every": 0, "skip_limit": 2}))
