"""The exponential moving average of the weights: its recurrence, on every layout, resumed, evaluated and refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.distributed import Pool
from tests.train.test_loss_scale import DENSE
from tests.train.test_resume import equal
from tests.train.tiny import MIXTURE, losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.mesh.axes import Degrees
from xscale.parallel.engine.fsdp import FsdpEngine
from xscale.planning.memory import states_per_element
from xscale.planning.simulate_step import simulate_step
from xscale.settings.settings import build_on_meta

DECAY = 0.75
TRAIN: dict[str, Any] = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "eval_every": 2, "baseline": False}
DOUBLE = {"compute": "float64", "master": "float64"}


def averaged(folder: Path, name: str, train: dict[str, Any] | None = None, **sections: Any) -> int:
    """A run with an average of its weights."""
    given = {**TRAIN, "eval_sequences": 5, "ema_decay": DECAY, **(train or {})}
    return run(recipe(folder, name, **{"model": DENSE, "precision": DOUBLE, "train": given, **sections}))


def saved(folder: Path, name: str, step: int = 4) -> dict[str, Tensor]:
    return load_tensors(folder / name / "checkpoints" / f"step-{step:08d}")


def ema_losses(folder: Path, name: str) -> list[float]:
    return [line["ema_eval_loss"] for line in metrics(folder, name) if "ema_eval_loss" in line]


def test_the_recurrence_and_a_skipped_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 is skipped, as a gradient of it is not finite."""
    reduce, steps = FsdpEngine.reduce_gradients, [0]

    def spoiled(self: FsdpEngine, *given: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3:
            gradient = self.trained[0].gradient
            assert gradient is not None
            gradient.view(-1)[0] = math.inf
        return reduce(self, *given)

    monkeypatch.setattr(FsdpEngine, "reduce_gradients", spoiled)
    # The policy makes the run save before its first step; no spike is known until 50 losses are.
    train = {"spike": {"policy": "rollback"}, "freeze": ["embed.*"]}
    every = {"every_steps": 1, "keep_last": None}
    assert averaged(tmp_path, "run", train, checkpoint=every) == EXIT_DONE
    before = saved(tmp_path, "run", 0)
    names = [name.removeprefix("ema.") for name in before if name.startswith("ema.")]
    assert names
    frozen = {name.removeprefix("model.") for name in before if name.startswith("model.")} - set(names)
    assert frozen == {"embed.table.weight"}
    expected = {name: before[f"model.{name}"] for name in names}
    assert all(before[f"ema.{name}"].equal(expected[name]) for name in names)
    for step in (1, 2, 3, 4):
        after = saved(tmp_path, "run", step)
        if step == 3:
            assert all(after[f"ema.{name}"].equal(before[f"ema.{name}"]) for name in names)
        else:
            expected = {name: DECAY * expected[name] + (1 - DECAY) * after[f"model.{name}"] for name in names}
            assert not all(after[f"ema.{name}"].equal(before[f"ema.{name}"]) for name in names)
        for name in names:
            assert torch.allclose(after[f"ema.{name}"], expected[name], rtol=1e-13, atol=1e-15), (step, name)
        before = after


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}},
    "ep2": {"mesh": {"ep": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp2" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_average_as_one_process_does(name: str, tmp_path: Path, pool: Pool) -> None:
    """They evaluate the average too, and the weights are trained on as without an average."""
    model = MIXTURE if name == "ep2" else DENSE
    assert averaged(tmp_path, "single", model=model) == EXIT_DONE
    assert pool.run(averaged, 2, tmp_path, name, model=model, parallel=LAYOUTS[name]) == [EXIT_DONE] * 2
    alone, sharded = saved(tmp_path, "single"), saved(tmp_path, name)
    assert alone.keys() == sharded.keys()
    for key in (key for key in alone if key.startswith(("ema.", "model."))):
        assert torch.allclose(alone[key], sharded[key], rtol=1e-9, atol=1e-10), key
    assert ema_losses(tmp_path, name) == pytest.approx(ema_losses(tmp_path, "single"), rel=1e-9)
    assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "single"), rel=1e-9)


@pytest.mark.long
def test_evaluations_read_the_average_and_leave_the_weights(tmp_path: Path) -> None:
    assert averaged(tmp_path, "run", precision={}) == EXIT_DONE
    assert averaged(tmp_path, "without", {"ema_decay": None}, precision={}) == EXIT_DONE
    assert losses(tmp_path, "run") == losses(tmp_path, "without")
    evaluated = [line for line in metrics(tmp_path, "run") if "eval_loss" in line]
    assert len(evaluated) == 2
    assert all(abs(line["ema_eval_loss"] - line["eval_loss"]) > 1e-4 for line in evaluated)
    assert not ema_losses(tmp_path, "without")
    assert evaluate_run(tmp_path / "run", 5, ema=True)["loss"] == pytest.approx(evaluated[-1]["ema_eval_loss"])
    assert evaluate_run(tmp_path / "run", 5)["loss"] == pytest.approx(evaluated[-1]["eval_loss"])
    with pytest.raises(ConfigError, match=r"has no moving average of the weights.*Leave out --ema, or train with"):
        evaluate_run(tmp_path / "without", 5, ema=True)
    text = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert f", {evaluated[-1]['ema_eval_loss']:.4f} with the moving average" in text


def test_the_option_of_eval(tmp_path: Path) -> None:
    from xscale.cli.main import app

    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--ema", "--exits"])
    assert isinstance(result.exception, ConfigError)
    assert "--ema" in str(result.exception)


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, {}), pytest.param(2, {"zero": {"stage": 3}}, marks=pytest.mark.long)]
)
def test_a_resumed_run_has_the_same_average(ranks: int, parallel: dict[str, Any], tmp_path: Path, pool: Pool) -> None:
    layout = {"parallel": parallel, "precision": {}}
    assert pool.run(averaged, ranks, tmp_path, "whole", **layout) == [EXIT_DONE] * ranks
    assert pool.run(averaged, ranks, tmp_path, "stopped", {"stop_after": 2}, **layout) == [EXIT_REQUEUE] * ranks
    assert pool.run(averaged, ranks, tmp_path, "stopped", **layout) == [EXIT_DONE] * ranks
    equal(tmp_path, "stopped", "whole", last=4)
    assert any(name.startswith("ema.") for name in saved(tmp_path, "stopped"))


@pytest.mark.long
def test_a_run_resumes_on_another_layout(tmp_path: Path, pool: Pool) -> None:
    assert averaged(tmp_path, "whole") == EXIT_DONE
    stopped = pool.run(averaged, 2, tmp_path, "moved", {"stop_after": 2}, parallel={"zero": {"stage": 3}})
    assert stopped == [EXIT_REQUEUE] * 2
    assert pool.run(averaged, 2, tmp_path, "moved", parallel={"mesh": {"tp": 2}}) == [EXIT_DONE] * 2
    whole, moved = saved(tmp_path, "whole"), saved(tmp_path, "moved")
    assert whole.keys() == moved.keys()
    assert all(torch.allclose(whole[name], moved[name], rtol=1e-9, atol=1e-10) for name in whole)


@pytest.mark.long
@pytest.mark.parametrize(("before", "now", "text"), [(None, DECAY, "null"), (DECAY, None, "0.75")])
def test_a_run_keeps_its_average_or_its_lack_of_one(before: Any, now: Any, text: str, tmp_path: Path) -> None:
    """Another decay is a change like any, which the log tells."""
    quick = {"eval_every": 0, "ema_decay": before}
    assert averaged(tmp_path, "run", {**quick, "stop_after": 1}) == EXIT_REQUEUE
    with pytest.raises(ConfigError, match=rf"train\.ema_decay was {text} and is now .*Choose another run\.dir"):
        averaged(tmp_path, "run", {**quick, "ema_decay": now})
    if before is not None:
        assert averaged(tmp_path, "run", {**quick, "ema_decay": 0.5}) == EXIT_DONE
        text = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
        assert "since step 1: train.ema_decay 0.75 -> 0.5" in text


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    settings = recipe(tmp_path, train={"ema_decay": DECAY}, parallel={"zero": {"engine": "deepspeed", "stage": 2}})
    problems = [problem for problem in settings.check(2) if problem.path == "train.ema_decay"]
    assert [problem.advice for problem in problems] == ["Take null, or parallel.zero.engine=torch."]


def test_a_plan_counts_the_average(tmp_path: Path) -> None:
    degrees = Degrees(dp_shard=2)
    at_rest, simulated = [], []
    for decay in (None, DECAY):
        settings = recipe(tmp_path, model=DENSE, train={"ema_decay": decay}, parallel={"zero": {"stage": 2}})
        at_rest.append(set(states_per_element(settings, build_on_meta(settings, 260)).values()))
        simulated.append(simulate_step(settings, degrees, 0, 1, 260).state_bytes["optimizer"])
    assert at_rest == [{2.0}, {3.0}]
    assert simulated[1] * 2 == simulated[0] * 3


def test_the_average_is_exported(tmp_path: Path) -> None:
    """transformers reads the averages, where the weights differ; frozen weights are exported as they are."""
    transformers: Any = pytest.importorskip("transformers")
    from tests.train.test_load_run import call

    assert averaged(tmp_path, "run", {"freeze": ["embed.*"], "eval_every": 0}) == EXIT_DONE
    before = saved(tmp_path, "run")
    call("checkpoint", "export", tmp_path / "run", tmp_path / "exported", "--ema")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    state = model.state_dict()
    gain, table = state["model.norm.weight"], state["model.embed_tokens.weight"]
    assert gain.equal(before["ema.stack.norm.weight"])
    assert not gain.equal(before["model.stack.norm.weight"])
    # An export has no padding rows.
    assert table.equal(before["model.embed.table.weight"][: len(table)])
    with pytest.raises(ConfigError, match=r"--ema: 'deepspeed-universal' has the states of the optimizer"):
        call("checkpoint", "export", tmp_path / "run", tmp_path / "other", "--ema", "--to", "deepspeed-universal")


def test_an_export_without_an_average_is_refused(tmp_path: Path) -> None:
    from tests.train.test_load_run import call

    assert averaged(tmp_path, "run", {"ema_decay": None, "eval_every": 0}) == EXIT_DONE
    for name in ("hf", "megatron"):
        with pytest.raises(ConfigError, match=r"has no moving average of the weights.*train\.ema_decay, such as"):
            call("checkpoint", "export", tmp_path / "run", tmp_path / "exported", "--ema", "--to", name)
    assert not (tmp_path / "exported").exists()
