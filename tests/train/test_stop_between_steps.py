"""A stop signal in work between steps: the finished step is saved, what was cut short is repeated, no row is half.

The signal comes to the last rank alone, in the second batch of the work, and all ranks leave it together.
"""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.train.test_pairs import asked
from tests.train.tiny import metrics, recipe, run
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.evaluate import tasks
from xscale.evaluate.evaluate import order2_baseline
from xscale.evaluate.text_scorer import ScoreRequest
from xscale.mesh.environment import read_rank_info
from xscale.recipe import Recipe
from xscale.run.run_folder import is_interrupted
from xscale.step.batches import MicroBatches
from xscale.step.stepper import Stepper
from xscale.train import run as run_module
from xscale.train.after_step.step_reporter import StepReporter
from xscale.train.run_work import RunWork
from xscale.watchdog.watchdog import StopSignal, Watchdog

STEPS = 4
TRAIN: dict[str, Any] = {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "eval_every": 2, "eval_sequences": 24}
DOUBLE = {"compute": "float64", "master": "float64"}
BAD = 18
"""A sample of step 3, counted from 1."""
AFTER_SIGNAL = 2
"""Heartbeats at most between the signal and the end of the work: the batch that was begun, and the one that asks."""


def everything(folder: Path, name: str) -> Recipe:
    """A run that evaluates, asks tasks, profiles a step and writes samples."""
    train = {**TRAIN, "tasks": {"names": ["two"], "every_steps": 2}, "sample": {"prompts": ["def"], "tokens": 8}}
    observe = {"progress": False, "tensorboard": False, "report": True, "profile": {"at": 2, "steps": 1}}
    return recipe(folder, name, train=train, observe=observe, precision=DOUBLE)


def translating(folder: Path, name: str) -> Recipe:
    """A run that writes the targets of pairs at its end."""
    data = {"validation": 0.3}
    return asked(folder, name, train={**TRAIN, "eval_every": 0, "bleu_pairs": 4}, data=data, precision=DOUBLE)


def spiking(folder: Path, name: str) -> Recipe:
    """A run whose third step is not finite and leads back to the second."""
    train = {**TRAIN, "eval_every": 0, "nonfinite": "rollback"}
    return recipe(folder, name, train=train, checkpoint={"every_steps": 2}, precision=DOUBLE)


Make = Callable[[Path, str], Recipe]
CASES: dict[str, tuple[Make, str, int, int]] = {
    "evaluation": (everything, "evaluate", 2, 2),
    "task": (everything, "tasks", 3, 2),
    "profile": (everything, "profile", 1, 2),
    "last evaluation": (everything, "evaluate", 26, STEPS),
    "samples": (everything, "samples", 3, STEPS),
    "BLEU": (translating, "bleu", 3, STEPS),
    "rollback": (spiking, "rollback", 1, 2),
}
"""Case -> recipe, phase of the work, the heartbeat of this phase (on one process) with the signal, the step that is
saved then."""


def two_requests(scorer: Any, request: Any) -> dict[str, dict[str, float]]:
    """Stand in for lm_eval: four texts of different lengths, each scored by a forward of its own."""
    scores = scorer.score([ScoreRequest([1] * length, [2, 3]) for length in (3, 5, 7, 9)])
    return {"two": {"log_likelihood": sum(score.log_likelihood for score in scores)}}


def life(folder: Path, name: str, case: str, at: int | None) -> tuple[int, int]:
    """Train until the signal, None: to the end; return the status and the heartbeats of the work after the signal."""
    make, phase, _, _ = CASES[case]
    rank_info = read_rank_info()
    beat, count, late = Watchdog.heartbeat, [0], [0]
    training, nats, spoiled = MicroBatches.make, Stepper._forward_backward, list[bool]()

    def heartbeat(self: Watchdog, now: str, *given: Any, **named: Any) -> None:
        beat(self, now, *given, **named)
        if now != phase:
            return
        late[0] += at is not None and count[0] >= at
        count[0] += 1
        if count[0] == at and rank_info.rank == rank_info.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def watched(self: MicroBatches, samples: Any, *given: Any) -> Any:
        spoiled.extend([True] * (BAD in samples.index and make is spiking))
        return training(self, samples, *given)

    def spoil(self: Stepper, *given: Any) -> Tensor:
        loss = nats(self, *given)
        factor, spoiled[:] = math.nan if spoiled else 1.0, []
        return loss * factor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "heartbeat", heartbeat)
        patch.setattr(MicroBatches, "make", watched)
        patch.setattr(Stepper, "_forward_backward", spoil)
        patch.setattr(tasks, "load_tasks", lambda request: None)
        patch.setattr(tasks, "lm_eval_model", lambda scorer, *given: scorer)
        patch.setattr(tasks, "evaluate_tasks", two_requests)
        return run(make(folder, name)), late[0]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of the metrics without times."""
    times = ("seconds", "split/", "tokens_per_second", "mfu")
    return [
        {key: value for key, value in row.items() if not any(time in key for time in times)}
        for row in metrics(folder, name)
    ]


def sentences(folder: Path, name: str, start: str) -> list[str]:
    """Lines of the log that contain `start`, from there on."""
    lines = (folder / name / "log.txt").read_text(encoding="utf-8").splitlines()
    return [line[line.index(start) :] for line in lines if start in line]


def outcome(folder: Path, name: str) -> dict[str, Any]:
    """Return what a run leaves: rows in order of steps, sentences about samples and BLEU, the state at its end."""
    last = folder / name / "checkpoints" / f"step-{STEPS:08d}"
    state = read_state(last)
    return {
        "rows": sorted(rows(folder, name), key=lambda row: (row["step"], sorted(row))),
        "samples": sentences(folder, name, "sample "),
        "bleu": sentences(folder, name, "BLEU "),
        "profiles": len(list((folder / name / "profile").glob("step-*/rank-0.txt"))),
        "state": {key: value for key, value in state.items() if key != "pending"},
    }


Lives = Callable[[Path, str, int | None], list[tuple[int, int]]]
"""Trains in a folder a run of that name until the signal; statuses and heartbeats of `life`, by rank."""
Whole = Callable[[str, Lives], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the folder of the run `whole`, which no signal stopped: trained once for all cases of its recipe.

    It is called with the key of the lives, which begins with the name of the recipe, and with the lives.
    """
    folders: dict[str, Path] = {}

    def folder_of(key: str, lives: Lives) -> Path:
        if key not in folders:
            folder = tmp_path_factory.mktemp("whole")
            assert {status for status, _ in lives(folder, "whole", None)} == {EXIT_DONE}
            folders[key] = folder
        return folders[key]

    return folder_of


def checked(folder: Path, case: str, lives: Lives) -> None:
    """Compare a run that was stopped in the work with the one `whole` of that folder, which was not."""
    _, _, at, saved = CASES[case]
    cut = f"cut-{case.replace(' ', '-')}"
    for status, late in lives(folder, cut, at):
        assert (status, late <= AFTER_SIGNAL) == (EXIT_REQUEUE, True), (status, late)
    checkpoints = sorted(path.name for path in (folder / cut / "checkpoints").glob("step-*"))
    assert checkpoints[-1] == f"step-{saved:08d}"
    assert {status for status, _ in lives(folder, cut, None)} == {EXIT_DONE}, "a run that was stopped is not finished"
    assert outcome(folder, cut) == outcome(folder, "whole")
    ours, theirs = (load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}") for name in (cut, "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {status for status, _ in lives(folder, cut, None)} == {EXIT_DONE}
    assert len(rows(folder, cut)) == len(rows(folder, "whole")), "a finished run does nothing"


def test_every_kind_of_work_has_a_case() -> None:
    run_work: Any = RunWork(*[None] * 6)  # type: ignore[arg-type]
    phases = {"evaluation": "evaluate"}
    kinds = {phases.get(name, name) for name in run_work.table()}
    assert {phase for _, phase, _, _ in CASES.values()} == {*kinds, "rollback"}


QUICK = ("evaluation",)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.long) for case in CASES]
)
def test_on_one_process(whole: Whole, case: str) -> None:
    def lives(folder: Path, name: str, at: int | None) -> list[tuple[int, int]]:
        return [life(folder, name, case, at)]

    checked(whole(f"{CASES[case][0].__name__} on one", lives), case, lives)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "task" else pytest.mark.long) for case in CASES]
)
def test_on_two_ranks(whole: Whole, case: str, pool: Pool) -> None:
    def lives(folder: Path, name: str, at: int | None) -> list[tuple[int, int]]:
        # Two ranks share the batches of an evaluation.
        halved = at if at is None or CASES[case][1] != "evaluate" else 2 if at == 2 else 14
        results: list[tuple[int, int]] = pool.run(life, 2, folder, name, case, halved)
        return results

    checked(whole(f"{CASES[case][0].__name__} on two", lives), case, lives)


def signalled(folder: Path, name: str, how: str, **sections: Any) -> int:
    """Train a run that gets a signal at a moment that is no batch of work between steps."""
    begins, report = StopSignal.training_begins, StepReporter.report

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def begin(self: StopSignal) -> None:
        begins(self)
        kill()

    def reported(self: StepReporter, *given: Any) -> None:
        report(self, *given)
        if self.state.step == STEPS:
            kill()

    def baseline(corpus: Any, on_text: Callable[[], None]) -> float:
        kill()
        return order2_baseline(corpus, on_text)

    with pytest.MonkeyPatch.context() as patch:
        if how == "before the first step":
            patch.setattr(StopSignal, "training_begins", begin)
        elif how == "in the last step":
            patch.setattr(StepReporter, "report", reported)
        elif how == "in the baseline":
            patch.setattr(run_module, "order2_baseline", baseline)
        train = {**TRAIN, "eval_every": STEPS, "baseline": True}
        return run(recipe(folder, name, train=train, precision=DOUBLE, **sections))


MOMENTS = {"before the first step": 0, "in the last step": 1, "in the baseline": 1}
"""Moment -> checkpoints that there are then."""


@pytest.mark.long
@pytest.mark.parametrize("how", MOMENTS)
def test_other_moments(whole: Whole, how: str) -> None:
    folder = whole("with a baseline", lambda folder, name, at: [(signalled(folder, name, ""), 0)])
    cut = f"cut-{how.replace(' ', '-')}"
    assert signalled(folder, cut, how) == EXIT_REQUEUE
    assert len(list((folder / cut / "checkpoints").glob("step-*"))) == MOMENTS[how]
    assert is_interrupted(folder / cut) == (how != "before the first step")
    assert signalled(folder, cut, "") == EXIT_DONE
    assert not is_interrupted(folder / cut)
    assert rows(folder, cut) == rows(folder, "whole")
    assert len(sentences(folder, cut, "order-2")) == len(sentences(folder, "whole", "order-2"))


@pytest.mark.long
def test_work_that_is_cut_short_twice(whole: Whole) -> None:
    """The second life has the signal in the evaluation that it repeats, before any step of its own."""
    folder = whole("everything on one", lambda folder, name, at: [life(folder, name, "evaluation", at)])
    assert [life(folder, "cut-twice", "evaluation", at)[0] for at in (2, 3, None)] == [
        EXIT_REQUEUE,
        EXIT_REQUEUE,
        EXIT_DONE,
    ]
    assert outcome(folder, "cut-twice") == outcome(folder, "whole")


@pytest.mark.long
def test_more_steps_after_an_end_that_was_cut_short(tmp_path: Path) -> None:
    assert life(tmp_path, "cut", "samples", 3)[0] == EXIT_REQUEUE
    assert is_interrupted(tmp_path / "cut")
    assert run(recipe(tmp_path, "cut", train={**TRAIN, "steps": STEPS + 2}, precision=DOUBLE)) == EXIT_DONE
    assert not is_interrupted(tmp_path / "cut")
    assert [row["step"] for row in metrics(tmp_path, "cut") if "loss" in row] == list(range(1, STEPS + 3))
