"""Float16 with dynamic loss scaling: overflow lowers the scale and skips the step on all ranks, and a run resumes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.test_resume import equal
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.optim.optimizer.adamw import AdamW
from xscale.parallel.config import LossScaleConfig, ParallelConfig
from xscale.parallel.engine.fsdp import FsdpEngine
from xscale.parallel.precision.loss_scale import LossScale

TRAIN = {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "baseline": False}
HALF = {"compute": "float16", "loss_scale": {"initial": 2.0**12, "growth_interval": 2}}
DENSE: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 2,
        "block": {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "gated", "hidden": 32}},
    },
}


def half(folder: Path, name: str, overflow_at: int | None = None, **sections: Any) -> int:
    """A run in float16; in backward of step `overflow_at` the last rank's gradients overflow."""
    reduce, steps = FsdpEngine.reduce_gradients, [0]

    def spoiled(self: FsdpEngine, *given: Any) -> Any:
        steps[0] += 1
        if steps[0] == overflow_at and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            gradient = self.trained[0].gradient
            assert gradient is not None
            gradient.view(-1)[0] = math.inf
        return reduce(self, *given)

    FsdpEngine.reduce_gradients = spoiled  # type: ignore[method-assign,assignment]
    try:
        return run(recipe(folder, name, **{"train": TRAIN, "precision": HALF, "model": DENSE, **sections}))
    finally:
        FsdpEngine.reduce_gradients = reduce  # type: ignore[method-assign]


def test_an_overflow_halves_the_scale_and_skips_the_step(tmp_path: Path, pool: Pool) -> None:
    every = {"every_steps": 1, "keep_last": None}
    assert pool.run(half, 2, tmp_path, "run", 3, checkpoint=every) == [EXIT_DONE] * 2
    scales = [line["loss_scale"] for line in metrics(tmp_path, "run") if "loss" in line]
    assert [scale / 2**12 for scale in scales] == [1, 1, 2, 1, 1, 2]
    before, after, last = (load_tensors(tmp_path / "run" / "checkpoints" / f"step-0000000{step}") for step in (2, 3, 4))
    assert all(before[name].equal(after[name]) for name in before)
    assert not all(after[name].equal(last[name]) for name in last)
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert (state["skipped"], state["loss_scale"], state["loss_scale_steps"]) == (0, 2.0**13, 1)
    text = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "step 3: gradients overflow; the loss scale falls from 8192 to 4096, and the step is skipped" in text


@pytest.mark.long
def test_a_run_resumes_with_its_scale(tmp_path: Path, pool: Pool) -> None:
    stopped = {**TRAIN, "stop_after": 3}
    assert pool.run(half, 1, tmp_path, "run") == [EXIT_DONE]
    assert pool.run(half, 1, tmp_path, "again", train=stopped) == [EXIT_REQUEUE]
    assert read_state(tmp_path / "again" / "checkpoints" / "step-00000003")["loss_scale"] == 2.0**13
    assert pool.run(half, 1, tmp_path, "again") == [EXIT_DONE]
    equal(tmp_path, "again", "run")


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"zero": {"stage": 0}}),
    "zero2": (2, {"zero": {"stage": 2}}),
    "zero3": (2, {"zero": {"stage": 3}}),
    "tp2": (2, {"mesh": {"tp": 2}}),
    "pp2": (2, {"mesh": {"pp": 2}}),
    "ep2": (2, {"mesh": {"ep": 2}}),
}


@pytest.mark.long
def test_layouts_train_as_one_process_does(tmp_path: Path, pool: Pool) -> None:
    """With experts too, whose routers keep their precision; losses are those of float32, but for rounding."""
    from tests.train.tiny import MIXTURE

    pool.run(half, 1, tmp_path, "single", model=MIXTURE, precision={"compute": "float32"})
    for name, (ranks, parallel) in LAYOUTS.items():
        assert pool.run(half, ranks, tmp_path, name, model=MIXTURE, parallel=parallel) == [EXIT_DONE] * ranks
        scales = [line["loss_scale"] / 2**12 for line in metrics(tmp_path, name) if "loss" in line]
        assert scales == [1, 1, 2, 2, 4, 4], name
        for loss, single in zip(losses(tmp_path, name), losses(tmp_path, "single"), strict=True):
            assert math.isclose(loss, single, rel_tol=5e-3), name


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_are_divided_by_the_scale(clip: float | None) -> None:
    """Adam hardly sees a factor of its gradients, so they are read where the optimizer gets them."""
    updates: list[tuple[list[torch.Tensor], float]] = []

    class Optimizer:
        config = AdamW.Config()

        def scaled_step(self, gradients: list[torch.Tensor], lr: float, scale: float) -> None:
            updates.append((gradients, scale))

    owner: Any = torch.nn.Linear(1, 1)
    optimizer: Any = Optimizer()
    engine = FsdpEngine(owner, ParallelConfig(), optimizer, [], torch.device("cpu"), 1, clip)
    engine.gradients, engine.loss_scale = [torch.tensor([3.0, 4.0]) * 1024], 1024.0
    engine.apply(0.1, 5.0)
    ((gradients, scale),) = updates
    assert torch.equal(gradients[0] * scale, torch.tensor([3.0, 4.0]) * (1.0 if clip is None else clip / 5.0))


def test_the_scale() -> None:
    config = LossScaleConfig(growth_interval=3, minimum=4.0)
    scale = LossScale(16.0)
    scales = []
    for overflow in (False, False, False, False, True, True, True, True, False):
        scale = scale.after(config, overflow=overflow)
        scales.append((scale.scale, scale.steps))
    assert scales == [(16, 1), (16, 2), (32, 0), (32, 1), (16, 0), (8, 0), (4, 0), (4, 0), (4, 1)]
    assert LossScale(8.0).overflows(config, 2.0, math.inf)
    assert LossScale(8.0).overflows(config, 2.0, math.nan)
    assert not LossScale(8.0).overflows(config, math.nan, math.nan), "a lower scale does not help"
    assert not LossScale(4.0).overflows(config, 2.0, math.inf), "there is no lower scale"


def test_small_gradients_reach_the_weights() -> None:
    """Gradients of float16 below 2^-24 are zero without a scale, and those of float32 with it."""
    from xscale.nn.dims import Dims
    from xscale.nn.head.head import Head

    def gradient(dtype: torch.dtype, scale: float) -> torch.Tensor:
        torch.manual_seed(0)
        head = Head(Dims(width=8, depth=1, vocabulary=16, length=4, causal=True, position=None, std=0.02), None)
        weight = torch.randn(16, 8).to(dtype)
        x = torch.randn(4, 8).to(dtype).requires_grad_()
        loss = head.cross_entropy(x, weight, torch.arange(4))
        (loss * 1e-7 * scale).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad.double() / scale

    exact = gradient(torch.float32, 1.0)
    assert torch.allclose(gradient(torch.float16, 2.0**16), exact, rtol=2e-2, atol=1e-10)
    assert not torch.allclose(gradient(torch.float16, 1.0), exact, rtol=2e-2, atol=1e-10), "the control"


def test_bad_scales_are_refused(tmp_path: Path) -> None:
    def problems(**precision: Any) -> list[str]:
        return [f"{one.path}: {one.what}" for one in recipe(tmp_path, precision=precision).check()]

    assert problems(loss_scale={"initial": 8.0})[0].startswith("precision.loss_scale: float32 has the range")
    assert "is no power of 2" in problems(compute="float16", loss_scale={"initial": 1000.0})[0]
    below = problems(compute="float16", loss_scale={"initial": 1.0, "minimum": 2.0})[0]
    assert below == "precision.loss_scale.initial: the scale begins at 1, below its minimum of 2"
    refused = recipe(tmp_path, precision={"compute": "float16"}, parallel={"zero": {"engine": "deepspeed"}})
    assert any("DeepSpeed would scale" in one.what or "not installed" in one.what for one in refused.check(2))
