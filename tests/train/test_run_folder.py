"""A run folder is whole: what is in it decides what a run does with it, and it is never half of one."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import metrics, recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, FaultError
from xscale.run.config_changes import LISTED, differences, problems_of
from xscale.run.run_folder import read_config
from xscale.train.after_step.step_reporter import StepReporter
from xscale.train.run_work import RunWork


def during_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]) -> None:
    """Do `action` in the run's step `step`."""
    report = StepReporter.report

    def reported(self: StepReporter, *stepped: Any) -> None:
        report(self, *stepped)
        if self.state.step == step:
            action()

    monkeypatch.setattr(StepReporter, "report", reported)


REPORTED = {"observe": {"report": True, "tensorboard": True, "progress": False}}


LONG = pytest.mark.long


@pytest.mark.parametrize("how", ["deleted", pytest.param("moved", marks=LONG), pytest.param("replaced", marks=LONG)])
def test_a_folder_that_vanishes_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def remove() -> None:
        shutil.rmtree(folder) if how == "deleted" else folder.rename(elsewhere)
        if how == "replaced":
            folder.mkdir()

    during_step(monkeypatch, 3, remove)
    said = r"was deleted, moved or replaced during step 3.*Move it back"
    if how != "deleted":
        said = rf"was moved to {elsewhere} during step 3, and the step is saved there\. Start again with run\.dir="
    with pytest.raises(FaultError, match=f"the run folder {said}"):
        run(recipe(tmp_path, **REPORTED))
    assert not folder.exists() or not list(folder.iterdir()), "a run folder without its config, data or weights"


def moved_on_two_ranks(top: Path) -> None:
    def move() -> None:
        if (top / "run").exists() and int(os.environ["RANK"]) == 0:
            (top / "run").rename(top / "elsewhere")

    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 3, move)
        with pytest.raises(FaultError, match=r"was moved to .*elsewhere during step 4, and the step is saved there"):
            run(recipe(top))


def test_a_folder_that_is_moved_has_the_step(tmp_path: Path, pool: Pool) -> None:
    """No step is lost, also that in which the second rank learns of it."""
    pool.run(moved_on_two_ranks, 2, tmp_path)
    assert run(recipe(tmp_path, "elsewhere")) == EXIT_DONE
    assert "since step 4: run.dir" in (tmp_path / "elsewhere" / "log.txt").read_text()
    assert [line["step"] for line in metrics(tmp_path, "elsewhere") if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", ["the disk is full", "the lock is deleted too"])
def test_a_moved_folder_that_cannot_be_saved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def move() -> None:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        if how == "the lock is deleted too":
            (tmp_path / "elsewhere" / "lock").unlink()
        else:
            (tmp_path / "elsewhere" / "checkpoints").write_text("no folder can be made here")

    during_step(monkeypatch, 3, move)
    with pytest.raises(FaultError, match=r"so nothing can be saved\. Move it back and start the same command again"):
        run(recipe(tmp_path))


def test_a_lock_that_is_deleted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run trains on to its end."""
    during_step(monkeypatch, 3, (tmp_path / "run" / "lock").unlink)
    assert run(recipe(tmp_path)) == EXIT_DONE
    assert (tmp_path / "run" / "lock").exists()


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.ENOSPC, FaultError, r"config\.yaml.* cannot be written: No space left on device\. Free space"),
        (errno.EIO, FaultError, r"config\.yaml.* cannot be written: Input/output error"),
        (errno.EPERM, ConfigError, r"run\.dir: .*config\.yaml.* cannot be written: Operation not permitted\. Let this"),
        (errno.EROFS, ConfigError, r"run\.dir: .*config\.yaml.* cannot be written: Read-only file system"),
    ],
)
def test_a_config_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], words: str
) -> None:
    """Full at the start or at a resume, or of a file that may not be replaced."""

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).name == "config.yaml":
            raise OSError(number, os.strerror(number), str(self), None, str(target))
        return before(self, target)

    before = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(error, match=words):
        run(recipe(tmp_path))


def test_a_folder_that_vanishes_before_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = RunWork.evaluate

    def evaluate_then_remove(self: RunWork) -> None:
        evaluate(self)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(RunWork, "evaluate", evaluate_then_remove)
    with pytest.raises(FaultError, match="Put the folder back"):
        run(recipe(tmp_path, train={"steps": 2, "batch_size": 8, "micro_batch_size": 2, "eval_every": 2}))
    assert not (tmp_path / "run").exists()


SIZES = {"batch_size": 8, "micro_batch_size": 2, "eval_every": 0}


def files_with_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"train": {"steps": 2}, "optimizer": {"kind": "adamw", "lr": 0.5}}, "optimizer.lr was 0.001 and is now 0.5"),
    ({"train": {"steps": 1}}, "train.steps was 2 and is now 1"),
    ({"train": {"steps": 2}, "schedule": {"kind": "constant"}}, "schedule.kind was cosine and is now constant"),
]
"""Changes of a finished run, and what is said of them."""


@pytest.mark.long
def test_a_finished_run_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finished = recipe(tmp_path, train={"steps": 2}, **REPORTED)
    assert run(finished) == EXIT_DONE
    before = files_with_times(tmp_path)
    capfd.readouterr()
    assert run(finished) == EXIT_DONE
    assert files_with_times(tmp_path) == before
    (line,) = capfd.readouterr().out.splitlines()
    assert "finished at step 2, nothing to do; train.steps above 2 trains on" in line
    with pytest.raises(ConfigError, match=r"finished at step 2, and would ignore that train\.steps was 2 and is now 1"):
        run(recipe(tmp_path, train={"steps": 1}, **REPORTED))
    with pytest.raises(ConfigError, match=r"contains another run: data\.sequence_length"):
        run(recipe(tmp_path, train={"steps": 2}, data={"sequence_length": 16}))
    for changes, said in IGNORED:
        with pytest.raises(ConfigError) as caught:
            run(recipe(tmp_path, **changes))
        assert f"finished at step 2, and would ignore that {said}" in str(caught.value)
        assert "Give another run.dir, or train.steps above 2" in str(caught.value)
    assert files_with_times(tmp_path) == before
    elsewhere = {"kernels": {}, "checkpoint": {"every_steps": 7}, "train": {"steps": 2, "stop_after": 1}}
    assert run(recipe(tmp_path, **elsewhere)) == EXIT_DONE, "what changes no result"
    assert run(recipe(tmp_path, train={"steps": 3})) == EXIT_DONE
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("removed", ["nothing", "config.yaml"])
def test_a_run_that_resumes_says_what_changed(tmp_path: Path, removed: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(recipe(tmp_path, train={**SIZES, "stop_after": 2}, optimizer={"kind": "adamw", "lr": 1e-3})) == (
        EXIT_REQUEUE
    )
    started_with = (tmp_path / "run" / "config.yaml").read_bytes()
    if removed != "nothing":
        (tmp_path / "run" / removed).unlink()
        with pytest.raises(ConfigError, match="contains another run: model"):
            run(recipe(tmp_path, model={"kind": "decoder", "width": 64}, train=SIZES))
    capfd.readouterr()
    assert run(recipe(tmp_path, train=SIZES, optimizer={"kind": "adamw", "lr": 3e-4})) == EXIT_DONE
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("since step")]
    assert said == ["since step 2: train.stop_after 2 -> null", "since step 2: optimizer.lr 0.001 -> 0.0003"]
    assert (tmp_path / "run" / "config.step-2.yaml").read_bytes() == started_with
    assert "lr: 0.0003" in (tmp_path / "run" / "config.yaml").read_text()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert all(line in log for line in said)


def test_an_unchanged_config_is_kept_once(tmp_path: Path) -> None:
    stopping = recipe(tmp_path, train={**SIZES, "stop_after": 2})
    assert [run(stopping) for _ in range(3)] == [EXIT_REQUEUE, EXIT_REQUEUE, EXIT_DONE]
    assert not list((tmp_path / "run").glob("config.step-*"))
    assert "since step" not in (tmp_path / "run" / "log.txt").read_text()


def test_prompts_that_cannot_be_used_are_refused_before_the_first_step(tmp_path: Path) -> None:
    prompts = ["fine", "", "x" * 32, "half a pair: \ud800"]
    with pytest.raises(ConfigError) as caught:
        run(recipe(tmp_path, train={"sample": {"prompts": prompts}}))
    assert [problem.path for problem in caught.value.problems] == [f"train.sample.prompts.{at}" for at in (1, 2, 3)]
    assert [problem.what.split("prompt")[1] for problem in caught.value.problems] == [
        " is empty",
        f" {'x' * 32!r} has 32 tokens, and at most 31 leave room for one more",
        " 'half a pair: \\ud800' is not valid Unicode",
    ]
    assert not (tmp_path / "run").exists()


def test_a_refusal_leaves_a_folder_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="is empty"):
        run(recipe(tmp_path, train={"sample": {"prompts": [""]}}))
    assert not list((tmp_path / "run").iterdir())


def refused_prompt(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        run(recipe(folder, train={"sample": {"prompts": [""]}}))


def test_a_refusal_on_two_ranks_leaves_no_folder(pool: Pool, tmp_path: Path) -> None:
    pool.run(refused_prompt, 2, tmp_path)
    assert not (tmp_path / "run").exists()


def refused(folder: Path, device: str) -> tuple[list[str], bool]:
    """The places of all that is missing on this rank."""
    source = {"kind": "text", "paths": ["nowhere", "neither"]}
    try:
        run(recipe(folder, data={"source": source}, run={"dir": str(folder / "run"), "device": device}))
    except ConfigError as error:
        return [f"{problem.path} {problem.what}" for problem in error.problems], error.same_on_all_ranks
    raise AssertionError("it trains")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_that_several_ranks_miss_is_told_at_once(pool: Pool, tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = pool.run(refused, 2, tmp_path, device)
    files = ["data.source.paths 'nowhere' matches no file", "data.source.paths 'neither' matches no file"]
    gpu = ["run.device this machine has no GPU that torch can use"]
    # Without a device the ranks cannot meet: each says what it lacks, and rank 0 the files too.
    assert found == ([(files, True)] * 2 if device == "cpu" else [(gpu + files, False), (gpu, False)])


@pytest.mark.parametrize("special", ["pipe", "broken link", "folder"])
def test_a_config_that_is_no_file_is_not_a_folder_without_a_run(tmp_path: Path, special: str) -> None:
    file = tmp_path / "config.yaml"
    {"pipe": lambda: os.mkfifo(file), "broken link": lambda: file.symlink_to("gone"), "folder": file.mkdir}[special]()
    with pytest.raises(ConfigError, match=r"config\.yaml: the file cannot be read"):
        read_config(tmp_path)


def test_of_many_values_that_differ_the_first_are_listed() -> None:
    before = {"model": {"width": 32, "core": {"kind": "a", **{f"a{key}": 1 for key in range(20)}}}}
    now = {"model": {"width": 64, "core": {"kind": "b", **{f"b{key}": 1 for key in range(20)}}}}
    problems = [str(problem) for problem in problems_of(differences(before, now), "another run")]
    assert len(problems) == LISTED + 1
    assert "model.core.kind was a and is now b" in problems[0]
    assert "model.width was 32 and is now 64" in problems[1]
    assert "another run: 34 more values differ. Compare its config.yaml" in problems[-1]
