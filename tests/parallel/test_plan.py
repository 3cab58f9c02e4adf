"""The steps of a parallel plan: one order, and one line to log for each that did something."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, VOCABULARY, _mesh, asked
from tests.parallel.models import MODELS
from xscale.mesh.environment import read_rank_info
from xscale.parallel import plan as plans
from xscale.parallel.plan import STEPS, ParallelPlan
from xscale.settings.settings import build_on_meta

ORDER = ("pipeline", "context", "expert", "tensor", "activation checkpointing", "compile", "zero", "materialize")


def lines(model: dict[str, Any], parallel: dict[str, Any]) -> list[str]:
    """Lines that a rank logs."""
    settings = asked(model, parallel)
    mesh = _mesh(settings.parallel.mesh, read_rank_info())
    logged: list[str] = []
    plan = ParallelPlan(settings.parallel, settings.precision, LENGTH)
    plan.apply(build_on_meta(settings, VOCABULARY), mesh, SEED, logged.append)
    return logged


def test_the_steps_have_one_order() -> None:
    names = [step.name for step in STEPS]
    assert [name for name in names if name in ORDER] == list(ORDER)
    assert len(set(names)) == len(names)


def test_the_plan_applies_the_steps_of_the_tuple_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def apply(self, model: Any, *others: Any) -> tuple[Any, str]:
            return model, self.name

    monkeypatch.setattr(plans, "STEPS", tuple(Recorded(name) for name in ("second", "first")))
    settings = asked(MODELS["dense"], {})
    mesh = _mesh(settings.parallel.mesh, read_rank_info())
    ParallelPlan(settings.parallel, settings.precision).shard(
        build_on_meta(settings, VOCABULARY), mesh, lambda model: None, applied.append
    )
    assert applied == ["second", "first"]


def test_a_single_process_logs_only_its_parameters() -> None:
    (line,) = lines(MODELS["dense"], {})
    assert line.startswith("Materialized ")


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_a_plan_checks_what_modules_need(axis: str) -> None:
    """A run that is loaded on other ranks, or read as a teacher, has no other check than that of its plan."""
    stack = {**MODELS["dense"]["stack"], "pooling": {"before": [1]}}
    model = {**MODELS["dense"], "kind": "encoder", "stack": stack, "position": "alibi"}
    settings = asked(model, {"mesh": {axis: 2}})
    problems = ParallelPlan(settings.parallel, settings.precision, LENGTH).check(build_on_meta(settings, VOCABULARY), 2)
    assert f"parallel.mesh.{axis}" in [problem.path for problem in problems]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_float32_matmuls_have_the_precision_of_the_recipe(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    settings = asked(MODELS["dense"], {})
    chosen = settings.precision.model_copy(
        update={"compute": "float32", "master": "float32", "float32_matmul": precision}
    )
    logged: list[str] = []
    try:
        torch.set_float32_matmul_precision("medium")
        plan = ParallelPlan(settings.parallel, chosen, LENGTH)
        mesh = _mesh(settings.parallel.mesh, read_rank_info())
        plan.apply(build_on_meta(settings, VOCABULARY), mesh, SEED, logged.append)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert ("Applied float32 matmuls of high precision" in logged) == (precision == "high")


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (
            {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 2, "granularity": "selective"}},
            ["Sharded ", "Applied tensor parallelism tp=2 with sequence parallelism to ",
             "Applied selective activation checkpointing to ", "Applied ZeRO-1 (fully_shard) over 1 ranks"],
        ),
        ({"mesh": {"dp_shard": 2}, "zero": {"stage": 2}}, ["Applied ZeRO-2 (fully_shard) over 2 ranks"]),
        (
            {"mesh": {"pp": 2}},
            ["Applied pipeline parallelism pp=2, schedule 1f1b, blocks 0", "Applied ZeRO-1 (fully_shard) over 1 ranks"],
        ),
        (
            {"mesh": {"cp": 2}, "context": {"style": "ring"}},
            ["Applied context parallelism cp=2 (ring) to ", "Applied ZeRO-1 (fully_shard) over 2 ranks"],
        ),
    ],
    ids=["tp", "zero", "pp", "cp"],
)  # fmt: skip
def test_each_step_that_did_something_logs_a_line(pool: Pool, parallel: dict[str, Any], expected: list[str]) -> None:
    logged = pool.run(lines, 2, MODELS["dense"], parallel)[0]
    assert len(logged) == len(expected) + 1
    for line, start in zip(logged, [*expected, "Materialized "], strict=True):
        assert line.startswith(start)
