"""Schedule-free AdamW: the paper's recurrences by elements, the authors' package, what a run saves and evaluates."""

import math
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor

from tests.conformance.made import drawn
from tests.distributed import Pool
from tests.train.test_loss_scale import DENSE
from tests.train.test_resume import equal
from tests.train.tiny import MIXTURE, losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.optim.optimizer.optimizer import LocalParameter
from xscale.optim.optimizer.schedule_free_adamw import ScheduleFreeAdamW, bits_of, float_of
from xscale.planning.memory import states_per_element
from xscale.settings.settings import build_on_meta

BETA1, BETA2, EPS, DECAY, LR, WARMUP = 0.8, 0.95, 1e-3, 0.3, 0.05, 4
STEPS = 12


def gradient_of(y: Tensor, step: int) -> Tensor:
    """A gradient that depends on where it is computed."""
    return y.sin() + 0.3 * drawn(*y.shape, seed=step)


def rate(step: int) -> float:
    return LR * min(1.0, step / WARMUP)


def by_elements(start: Tensor) -> tuple[list[float], list[float], list[float]]:
    """x, y and z after the steps, each element by the equations, as lists."""
    x, z = start.flatten().tolist(), start.flatten().tolist()
    v = [0.0] * len(x)
    gamma_squares = 0.0
    for t in range(1, STEPS + 1):
        y = [(1 - BETA1) * zi + BETA1 * xi for zi, xi in zip(z, x, strict=True)]
        g = gradient_of(torch.tensor(y, dtype=torch.float64).view_as(start), t).flatten().tolist()
        gamma = rate(t)
        gamma_squares += gamma**2
        c = gamma**2 / gamma_squares
        for i in range(len(x)):
            v[i] = BETA2 * v[i] + (1 - BETA2) * g[i] ** 2
            z[i] -= gamma * (g[i] / (math.sqrt(v[i] / (1 - BETA2**t)) + EPS) + DECAY * y[i])
            x[i] = (1 - c) * x[i] + c * z[i]
    return x, [(1 - BETA1) * zi + BETA1 * xi for zi, xi in zip(z, x, strict=True)], z


def stepped(start: Tensor) -> tuple[Tensor, ScheduleFreeAdamW]:
    weight = LocalParameter("w", start.clone(), decays=True)
    config = ScheduleFreeAdamW.Config(lr=LR, weight_decay=DECAY, beta1=BETA1, beta2=BETA2, eps=EPS)
    optimizer = ScheduleFreeAdamW(config, [weight])
    for t in range(1, STEPS + 1):
        optimizer.step([gradient_of(weight.value, t)], rate(t))
    return weight.value, optimizer


def test_the_equations_of_the_paper() -> None:
    start = drawn(3, 4)
    y, optimizer = stepped(start)
    expected = by_elements(start)
    for value, wanted in zip((optimizer.x[0], y, optimizer.z[0]), expected, strict=True):
        assert value.flatten().tolist() == pytest.approx(wanted, rel=1e-11)
    assert (optimizer.x[0] - y).abs().max() > 1e-3


def test_the_authors_package() -> None:
    start = drawn(3, 4)
    parameter = torch.nn.Parameter(start.clone())
    theirs = schedulefree.AdamWScheduleFree(
        [parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, warmup_steps=WARMUP
    )
    theirs.train()
    for t in range(1, STEPS + 1):
        parameter.grad = gradient_of(parameter.detach(), t)
        theirs.step()
    y, optimizer = stepped(start)
    assert torch.allclose(parameter.detach(), y, rtol=1e-9)
    theirs.eval()
    assert torch.allclose(parameter.detach(), optimizer.x[0], rtol=1e-9)


def test_doubles_are_counters() -> None:
    for value in (0.0, 1e-30, 0.1, 1e300):
        assert float_of(bits_of(value)) == value
        assert 0 <= bits_of(value) < 2**63


TRAIN: dict[str, Any] = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "eval_every": 2, "baseline": False}
DOUBLE = {"compute": "float64", "master": "float64"}


def averaged(folder: Path, name: str, train: dict[str, Any] | None = None, **sections: Any) -> int:
    given = {**TRAIN, "eval_sequences": 5, **(train or {})}
    defaults = {
        "model": DENSE,
        "precision": DOUBLE,
        "optimizer": {"kind": "schedule_free_adamw", "lr": 1e-2},
        "schedule": {"kind": "constant", "warmup_steps": 2},
    }
    return run(recipe(folder, name, **{**defaults, "train": given, **sections}))


def saved(folder: Path, name: str, step: int = 4) -> dict[str, Tensor]:
    return load_tensors(folder / name / "checkpoints" / f"step-{step:08d}")


def evaluations(folder: Path, name: str) -> list[float]:
    return [line["eval_loss"] for line in metrics(folder, name) if "eval_loss" in line]


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}},
    "ep2": {"mesh": {"ep": 2}},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp2" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_train_and_evaluate_as_one_process_does(name: str, tmp_path: Path, pool: Pool) -> None:
    model = MIXTURE if name == "ep2" else DENSE
    assert averaged(tmp_path, "single", model=model) == EXIT_DONE
    assert pool.run(averaged, 2, tmp_path, name, model=model, parallel=LAYOUTS[name]) == [EXIT_DONE] * 2
    alone, sharded = saved(tmp_path, "single"), saved(tmp_path, name)
    assert alone.keys() == sharded.keys()
    assert not [key for key in alone if key.startswith("optimizer.x.")]
    for key in alone:
        assert torch.allclose(alone[key], sharded[key], rtol=1e-9, atol=1e-10), key
    assert evaluations(tmp_path, name) == pytest.approx(evaluations(tmp_path, "single"), rel=1e-9)
    assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "single"), rel=1e-9)


@pytest.mark.long
def test_the_average_is_saved_and_evaluated_and_training_goes_on_from_y(tmp_path: Path) -> None:
    """A run that evaluates trains as one that does not; what it reports is the loss of the saved weights."""
    every = {"every_steps": 2, "keep_last": None}
    assert averaged(tmp_path, "run", checkpoint=every) == EXIT_DONE
    assert averaged(tmp_path, "blind", {"eval_every": 0}, checkpoint=every) == EXIT_DONE
    assert losses(tmp_path, "run") == losses(tmp_path, "blind")
    assert evaluate_run(tmp_path / "run", 5)["loss"] == pytest.approx(evaluations(tmp_path, "run")[-1], rel=1e-9)
    tensors = saved(tmp_path, "run")
    name = "stack.blocks.0.ffn.part.up.weight"
    x, z = tensors[f"model.{name}"], tensors[f"optimizer.z.{name}"]
    assert (x - z).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, {}), pytest.param(2, {"zero": {"stage": 3}}, marks=pytest.mark.long)]
)
def test_a_resumed_run_is_bitwise_the_same(ranks: int, parallel: dict[str, Any], tmp_path: Path, pool: Pool) -> None:
    layout = {"parallel": parallel, "precision": {}}
    assert pool.run(averaged, ranks, tmp_path, "whole", **layout) == [EXIT_DONE] * ranks
    assert pool.run(averaged, ranks, tmp_path, "stopped", {"stop_after": 2}, **layout) == [EXIT_REQUEUE] * ranks
    assert pool.run(averaged, ranks, tmp_path, "stopped", **layout) == [EXIT_DONE] * ranks
    equal(tmp_path, "stopped", "whole", last=4)


@pytest.mark.long
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    """x and z start as the weights that init.from has, not as those that were drawn."""
    assert averaged(tmp_path, "first", {"eval_every": 0}) == EXIT_DONE
    train = {"eval_every": 0, "spike": {"policy": "rollback"}, "steps": 1}
    begun = {"init": {"from": str(tmp_path / "first")}, "run": {"dir": str(tmp_path / "second"), "seed": 9}}
    every = {"every_steps": 1, "keep_last": None}
    assert averaged(tmp_path, "second", train, checkpoint=every, **begun) == EXIT_DONE
    first, second = saved(tmp_path, "first"), saved(tmp_path, "second", 0)
    for name in (name.removeprefix("model.") for name in first if name.startswith("model.")):
        assert torch.equal(first[f"model.{name}"], second[f"model.{name}"])
        assert torch.equal(first[f"model.{name}"], second[f"optimizer.z.{name}"])


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"schedule": {"kind": "cosine"}}, "schedule.kind"),
        ({"train": {"ema_decay": 0.9}}, "train.ema_decay"),
        ({"parallel": {"zero": {"engine": "deepspeed", "stage": 2}}}, "optimizer.kind"),
        ({"optimizer": {"groups": [{"match": "embed.*", "since": 0.5}]}}, "optimizer.groups.0"),
    ],
)
def test_what_does_not_go_with_an_average_is_refused(sections: dict[str, Any], path: str, tmp_path: Path) -> None:
    optimizer = {"kind": "schedule_free_adamw", **sections.pop("optimizer", {})}
    given = {"schedule": {"kind": "constant"}, **sections}
    problems = recipe(tmp_path, model=DENSE, optimizer=optimizer, **given).check()
    # A single process is too few for DeepSpeed.
    assert [problem.path for problem in problems if not problem.path.startswith("parallel.")] == [path]


def test_a_plan_counts_the_states(tmp_path: Path) -> None:
    settings = recipe(tmp_path, model=DENSE, optimizer={"kind": "schedule_free_adamw"})
    assert set(states_per_element(settings, build_on_meta(settings, 260)).values()) == {3.0}
