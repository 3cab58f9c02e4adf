"""Runs on contiguous streams with a memory: layouts agree, a stopped run resumes in the middle of its streams bitwise,
and on another layout every row finds its segment and its memory again. With dropout, in float64."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.mesh.axes import Degrees
from xscale.nn.depth.segment_memory.memory import EMPTY
from xscale.planning.simulate_step import simulate_step
from xscale.step.stepper import Stepper

MIDDLE, STEPS = 3, 5
MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 24,
    "dropout": 0.1,
    "position": {"kind": "transformer_xl", "shared_biases": True},
    "stack": {
        "depth": 2,
        "segment_memory": {"length": 20, "compression": {"slots": 5, "rate": 2}},
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2},
            "ffn": {"kind": "dense", "hidden": 32},
            "norm": "layer",
            "dropout": 0.1,
        },
    },
}
SUMMARY: dict[str, Any] = {
    **MODEL,
    "stack": {**MODEL["stack"], "segment_memory": None, "segment_summary": {"layer": 1}},
}
FEEDBACK: dict[str, Any] = {**MODEL, "stack": {**MODEL["stack"], "segment_memory": None, "feedback": {"length": 6}}}
MODELS = {"memory": MODEL, "summary": {**SUMMARY, "position": "learned"}, "feedback": FEEDBACK}
TRAIN = {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "eval_every": STEPS, "eval_sequences": 21}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "recompute": (1, {"recompute": {"every": 1}}),
    "dp": (2, {"mesh": {"dp_replicate": 2}, "zero": {"stage": 0}}),
    "zero3": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "dp 4": (4, {"mesh": {"dp_shard": 4}, "zero": {"stage": 1}}),
    "pp dp": (4, {"mesh": {"pp": 2, "dp_shard": 2}}),
}
"""Ranks and section of each."""


def one_rank(folder: Path, name: str, layout: str, model: str) -> int:
    double = {"compute": "float64", "master": "float64"}
    kept = {"every_steps": MIDDLE, "keep_last": None}
    data = {"order": "streams", "sequence_length": 16}
    parallel = LAYOUTS[layout][1]
    sections = {"model": MODELS[model], "data": data, "train": TRAIN, "precision": double, "parallel": parallel}
    return run(recipe(folder, name, checkpoint=kept, **sections))


class Runs:
    """Runs, each done once and when it is first asked for."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder, self.pool = folder, pool
        self.whole = cache(self._whole)

    def _whole(self, layout: str, model: str = "memory") -> str:
        name = f"{model} {layout}"
        self._run(name, layout, model)
        return name

    def resumed(self, before: str, after: str, model: str = "memory") -> str:
        source, name = self.folder / self.whole(before, model), f"{model} {before} to {after}"
        middle = f"step-{MIDDLE:08d}"
        shutil.copytree(source / "checkpoints" / middle, self.folder / name / "checkpoints" / middle)
        shutil.copy(source / "config.yaml", self.folder / name)
        shutil.copy(source / "metrics.jsonl", self.folder / name)
        self._run(name, after, model)
        return name

    def _run(self, name: str, layout: str, model: str) -> None:
        count = LAYOUTS[layout][0]
        assert self.pool.run(one_rank, count, self.folder, name, layout, model) == [EXIT_DONE] * count

    def end(self, name: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.folder / name / "checkpoints" / f"step-{STEPS:08d}", verify=False)

    def evaluations(self, name: str) -> list[float]:
        return [line["eval_loss"] for line in metrics(self.folder, name) if "eval_loss" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), pool)


def require_same_run(runs: Runs, name: str, tolerance: float = 1e-9) -> None:
    alone = runs.whole("alone", name.split()[0])
    for of in (lambda name: losses(runs.folder, name), runs.evaluations):
        ours, theirs = (torch.tensor(of(run), dtype=torch.float64) for run in (name, alone))
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=0), (ours, theirs)
    ours, theirs = runs.end(name), runs.end(alone)
    assert ours.keys() == theirs.keys()
    far = {key: (ours[key] - tensor).abs().max().item() for key, tensor in theirs.items() if tensor.numel()}
    assert max(far.values()) <= tolerance, {key: value for key, value in far.items() if value > tolerance}


QUICK = ("dp",)


def layouts(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


@pytest.mark.parametrize("layout", layouts(name for name in LAYOUTS if name != "alone"))
def test_layouts_agree(runs: Runs, layout: str) -> None:
    require_same_run(runs, runs.whole(layout, "memory"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("summary", layout) for layout in ("dp", "zero3", "tp", "recompute")),
        *(("feedback", layout) for layout in ("dp", "zero3", "tp")),
    ],
)
def test_layouts_of_other_memories_agree(runs: Runs, model: str, layout: str) -> None:
    require_same_run(runs, runs.whole(layout, model))
    require_same_run(runs, runs.resumed("alone", layout, model))


def test_a_run_resumes_in_the_middle_of_its_streams_bitwise(runs: Runs) -> None:
    require_same_run(runs, runs.resumed("alone", "alone"), tolerance=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp", "alone"),
        pytest.param("alone", "dp 4", marks=pytest.mark.long),
        pytest.param("dp 4", "dp", marks=pytest.mark.long),
        pytest.param("zero3", "tp", marks=pytest.mark.long),
        pytest.param("pp dp", "zero3", marks=pytest.mark.long),
        pytest.param("tp", "pp dp", marks=pytest.mark.long),
    ],
)
def test_streams_and_their_memory_move_to_another_layout(runs: Runs, before: str, after: str) -> None:
    require_same_run(runs, runs.resumed(before, after))


def test_the_numbers_would_tell(runs: Runs) -> None:
    """The control: memories differ between steps and rows, and the model reads them."""
    alone = runs.whole("alone", "memory")
    middle = load_tensors(runs.folder / alone / "checkpoints" / f"step-{MIDDLE:08d}")
    end = runs.end(alone)
    names = [name for name in end if name.startswith("segments.stack.segment_memory.")]
    kept = ["0", "1", "documents"]
    assert sorted(name.split(".segment_memory.")[1] for name in names) == [
        *kept[:2],
        *[f"compressed.{name}" for name in kept],
        "documents",
    ]
    for name in [name for name in end if name.startswith("model.stack.segment_memory.compress")]:
        assert (end[name] - middle[name]).abs().max() > 1e-6, f"{name} is not trained"
    memory = end["segments.stack.segment_memory.1"]
    assert memory.shape == (8, 20, 24)
    assert (memory - middle["segments.stack.segment_memory.1"]).abs().amax((1, 2)).min() > 1e-3
    assert (memory[1:] - memory[:-1]).abs().amax((1, 2)).min() > 1e-3


def test_a_memory_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    stack = {**MODEL["stack"], "segment_memory": {"length": 10**7}}
    long = recipe(tmp_path, model={**MODEL, "stack": stack}, data={"order": "streams", "sequence_length": 16})
    with pytest.raises(
        ConfigError, match=r"model\.stack\.segment_memory\.length: is 10000000 tokens, and the training"
    ):
        run(long)


def test_a_plan_knows_the_memory_of_the_rows() -> None:
    """A longer memory takes more room, and the step of a rank can be simulated with it."""
    peaks = []
    for length in (16, 256):
        stack = {**MODEL["stack"], "segment_memory": {"length": length}}
        data = {"order": "streams", "sequence_length": 16}
        settings = recipe(Path("nowhere"), model={**MODEL, "stack": stack}, data=data)
        peaks.append(simulate_step(settings, Degrees(), 0, 2, 64).peak.kinds["activations"])
    # Keys of two blocks and of four rows, and what the rows keep.
    assert peaks[1] - peaks[0] > 4 * (256 - 16) * 24 * 4 * 2


def spoiled(folder: Path, nonfinite: str) -> int:
    """A run whose third forward has a loss that is no number."""
    forward, calls = Stepper._forward_backward, []

    def third_is_nan(self: Stepper, *given: Any) -> torch.Tensor:
        calls.append(forward(self, *given))
        return calls[-1] * float("nan") if len(calls) == 3 else calls[-1]

    Stepper._forward_backward = third_is_nan  # type: ignore[method-assign]
    try:
        data = {"order": "streams", "sequence_length": 16}
        train = {**TRAIN, "eval_every": 0, "nonfinite": nonfinite}
        kept = {"every_steps": 1, "keep_last": None}
        return run(recipe(folder, nonfinite, model=MODEL, data=data, train=train, checkpoint=kept))
    finally:
        Stepper._forward_backward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(("nonfinite", "empty"), [("skip", 20), ("rollback", 4)])
def test_no_memory_is_kept_of_a_segment_that_is_left_out(
    tmp_path: Path, pool: Pool, nonfinite: str, empty: int
) -> None:
    """After a skipped step it is empty; after a rollback it has what the next step, on later samples, has read."""
    assert pool.run(spoiled, 1, tmp_path, nonfinite) == [EXIT_DONE]
    folder = tmp_path / nonfinite / "checkpoints"
    name = "segments.stack.segment_memory.documents"
    slots = [load_tensors(folder / f"step-{step:08d}", [name])[name] for step in (2, 3)]
    assert [(documents == EMPTY).sum(1).tolist() for documents in slots] == [[0] * 8, [empty] * 8]
