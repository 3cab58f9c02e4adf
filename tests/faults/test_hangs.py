"""A rank that hangs, raises, is killed, is slow, or was given another config: all stop, and the message names it."""

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool, RankError
from tests.faults.dying import fork, save_step, visible
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.files import RunLock
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.mesh.environment import read_rank_info
from xscale.parallel.pipeline.microbatch_runner import MicrobatchRunner
from xscale.step.step_batches import StepBatches

Count = Callable[[int, str], None]
STEP = 3
SECONDS = 4.0
WAITS = {
    "dp": r"; rank 0 waits for it in all\w+ \(number \d+ of group 0 of ranks 0, 1\)",
    "pp": r"; rank 0 (waits for it in|at step 3)",
}
AFTER_SECONDS = 120.0
"""A hang is named so soon after its time-out."""


def struck(folder: Path, name: str, how: str, rank: int, **sections: Any) -> int:
    """A run in which something happens to `rank` when it has step STEP's micro-batches."""
    before = StepBatches.take

    def batches(self: StepBatches) -> Any:
        found = before(self)
        if found[0].step == STEP and read_rank_info().rank == rank:
            (folder / f"{name}.struck").write_text(str(time.time()))
            strike(how)
        return found

    StepBatches.take = batches  # type: ignore[method-assign]
    try:
        return run(recipe(folder, name, **sections))
    finally:
        StepBatches.take = before  # type: ignore[method-assign]


def strike(how: str) -> None:
    if how == "hangs":
        time.sleep(600)
    elif how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raises":
        raise ValueError("a fault of the test's")
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "is asked to stop and hangs":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    elif how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "is slow":
        time.sleep(SECONDS)
    elif how == "holds the interpreter":
        re.match(r"(a+)+$", "a" * 40 + "b")


def struck_in_stage(folder: Path, name: str, **sections: Any) -> int:
    """A run in which rank 1 hangs in the forward of its second micro-batch."""
    before = MicrobatchRunner.run

    def compute(self: MicrobatchRunner, action: Any, *given: Any) -> Any:
        if read_rank_info().rank == 1 and (action.kind, action.micro) == ("F", 1):
            time.sleep(600)
        return before(self, action, *given)

    MicrobatchRunner.run = compute  # type: ignore[method-assign]
    try:
        return run(recipe(folder, name, **sections))
    finally:
        MicrobatchRunner.run = before  # type: ignore[method-assign]


def test_the_message_that_a_stage_waits_for_is_named(tmp_path: Path, pool: Pool) -> None:
    parallel = layout(mesh={"pp": 2}, pipeline={"schedule": "1f1b"}, start_timeout_seconds=SECONDS)
    with pytest.raises(RankError):
        pool.run(struck_in_stage, 2, tmp_path, "run", parallel=parallel)
    sentence = files(tmp_path, "run")["verdict.txt"].read_text()
    assert sentence.startswith("rank 1 hangs at step 1 (forward)"), sentence
    waits = "; rank 0 at step 1 (communicate), waiting for the receive of the gradients of micro-batch 1 for stage 0"
    assert f"{waits} from rank 1" in sentence, sentence


def layout(seconds: float = SECONDS, **more: Any) -> dict[str, Any]:
    return {"timeout_seconds": seconds, **more}


def texts(pool: Pool, ranks: int, *given: Any, **sections: Any) -> dict[int, str]:
    """Output of each rank that failed."""
    with pytest.raises(RankError) as failure:
        pool.run(struck, ranks, *given, **sections)
    return failure.value.texts


def files(folder: Path, name: str) -> dict[str, Path]:
    (attempt,) = (folder / name / "faults").iterdir()
    return {path.name: path for path in attempt.iterdir()}


@pytest.mark.parametrize("parallel", [{}, pytest.param({"mesh": {"pp": 2}}, marks=pytest.mark.long)], ids=["dp", "pp"])
def test_a_rank_that_hangs(tmp_path: Path, pool: Pool, parallel: dict[str, Any], count_cases: Count) -> None:
    said = texts(pool, 2, tmp_path, "run", "hangs", 1, parallel=layout(**parallel))
    found = files(tmp_path, "run")
    sentence = found["verdict.txt"].read_text()
    took = found["verdict.txt"].stat().st_mtime - float((tmp_path / "run.struck").read_text())
    assert SECONDS < took < SECONDS + AFTER_SECONDS
    assert sentence.startswith("rank 1 hangs at step 3 (data) for "), sentence
    assert re.search(r" s, in \S+test_hangs\.py:\d+ in strike", sentence), sentence
    assert re.search(WAITS["pp" if parallel else "dp"], sentence), sentence
    for rank in (0, 1):
        assert sentence.strip() in said[rank], said[rank]
        stacks = found[f"rank-{rank:05d}.txt"].read_text()
        assert ("in strike" in stacks) == (rank == 1), stacks
        assert "Last collectives" in stacks
        entries = pickle.loads(found[f"flight-{rank}"].read_bytes())["entries"]
        assert any("all" in entry["profiling_name"] for entry in entries)
    count_cases(1, "a rank hangs: named with step and collective, all end")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", r"rank 1 failed at step 3 \(data\): ValueError: a fault of the test's"),
        ("is killed", r"rank 1 does not answer: killed, stopped or cut off; rank 0 was at step 3 \(\w+\)"),
    ],
)
def test_a_rank_that_is_lost(tmp_path: Path, pool: Pool, how: str, words: str, count_cases: Count) -> None:
    said = texts(pool, 2, tmp_path, "run", how, 1, parallel=layout(600.0))
    took = time.time() - float((tmp_path / "run.struck").read_text())
    assert took < 300, "before the watchdog's own timeout"
    assert re.search(words, said[0]), said[0]
    if how == "raises":
        assert "rank 1 failed at step 3 (data)" in said[1], "the rank's own traceback says which it is"
    count_cases(1, f"a rank {how} between two collectives: named with its step, all end")


@pytest.mark.long
@pytest.mark.parametrize("how", ["holds the interpreter"])
def test_a_rank_that_cannot_say_a_thing(tmp_path: Path, pool: Pool, how: str, count_cases: Count) -> None:
    said = texts(pool, 2, tmp_path, "run", how, 1, parallel=layout())
    assert re.search(
        r"rank 1 does not answer: killed, stopped or cut off; rank 0 was at step 3 \(\w+\), in all", said[0]
    )
    if how == "holds the interpreter":
        # The thread of C that needs no interpreter printed where it stood, and ended it.
        assert "in strike" in said[1], said[1]
    count_cases(1, f"a rank {how}: named, all end")


@pytest.mark.long
def test_a_slow_rank_is_let_be(tmp_path: Path, pool: Pool, count_cases: Count) -> None:
    """Slow, but within the time: nothing is said and nothing differs."""
    assert pool.run(struck, 2, tmp_path, "slow", "is slow", 1, parallel=layout(2 * SECONDS)) == [EXIT_DONE] * 2
    assert pool.run(struck, 2, tmp_path, "plain", "", 1, parallel=layout()) == [EXIT_DONE] * 2
    assert losses(tmp_path, "slow") == losses(tmp_path, "plain")
    assert not (tmp_path / "slow" / "faults").exists()
    count_cases(1, "a slow rank: let be")


def other_config(folder: Path) -> str:
    changed = {"optimizer": {"kind": "adamw", "lr": 0.5}} if read_rank_info().rank == 1 else {}
    with pytest.raises(ConfigError) as refusal:
        run(recipe(folder, "run", **changed))
    return str(refusal.value)


def test_ranks_with_different_configs(tmp_path: Path, pool: Pool, count_cases: Count) -> None:
    said = pool.run(other_config, 2, tmp_path)
    assert said[0] == said[1]
    assert said[0] == (
        "config: rank 1 was started with a different config: optimizer.lr is 0.5, on rank 0 0.001. "
        "Start every process with the same config and overrides."
    )
    count_cases(1, "ranks with different configs: named, refused")


def test_two_jobs_on_one_run_folder(tmp_path: Path, count_cases: Count) -> None:
    """The second is refused, is told who holds it, and changes nothing."""
    folder = tmp_path / "run"
    save_step(folder / "checkpoints", 1, config=encode(recipe(tmp_path, "run")))
    ready = tmp_path / "ready"

    def hold() -> None:
        with RunLock(folder):
            ready.touch()
            time.sleep(600)

    child = fork(hold, tmp_path / "log.txt")
    try:
        while not ready.exists():
            time.sleep(0.01)
        with pytest.raises(ConfigError, match=rf"another run is using this folder \(process {child} on") as refusal:
            run(recipe(tmp_path, "run"))
        assert "give another run.dir" in str(refusal.value)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert visible(folder / "checkpoints") == [1]
    assert not (folder / "config.yaml").exists()
    count_cases(1, "two jobs on one run folder: the second refused")


def test_too_late_to_save(tmp_path: Path, pool: Pool, count_cases: Count) -> None:
    """A signal, and a step that does not end: the process leaves, can go on, and says what stays."""
    said = texts(pool, 1, tmp_path, "run", "is asked to stop and hangs", 0, checkpoint={"deadline_seconds": 1.0})[0]
    assert re.search(r"the state of step 3 could not be saved within 1 s of SIGTERM \(checkpoint.deadline_sec", said), (
        said
    )
    assert "the process ended with status 75" in said, said
    count_cases(1, "a deadline that cannot be kept: said, and the run can go on")


def test_saved_within_the_deadline(tmp_path: Path, pool: Pool) -> None:
    """How long it took is logged, for every signal that a cluster sends."""
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        assert pool.run(struck, 1, tmp_path, name, name, 0) == [EXIT_REQUEUE]
        log = (tmp_path / name / "log.txt").read_text()
        assert re.search(
            rf"stopped at step 3: stopped by {name}; checkpoint saved after \d+\.\d s\. Run the same command", log
        ), log
        assert visible(tmp_path / name / "checkpoints") == [STEP]
