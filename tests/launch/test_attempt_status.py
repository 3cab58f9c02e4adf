"""How an attempt ended: the same out of its files, whoever wrote them first."""

import time
from pathlib import Path

import pytest

from xscale_launch import attempts


def test_all_well(tmp_path: Path) -> None:
    assert [attempts.record_task(tmp_path, task, 0, "") for task in range(3)] == [0, 0, 0]
    assert attempts.read_attempt(tmp_path, 3, 0) == (0, "")


def test_who_stopped_on_purpose_ends_the_task_well_and_the_attempt_with_75(tmp_path: Path) -> None:
    assert attempts.record_task(tmp_path, 0, 0, "") == 0
    assert attempts.record_task(tmp_path, 1, 75, "") == 0
    assert attempts.read_attempt(tmp_path, 2, 0) == (75, "")


def test_a_part_of_a_task_that_stopped_counts_for_the_attempt_and_not_for_the_task(tmp_path: Path) -> None:
    attempts.record_task(tmp_path, None, 75, "")
    assert attempts.read_attempt(tmp_path, 1, 0)[0] == attempts.NO_REPORT
    attempts.record_task(tmp_path, 0, 0, "")
    assert attempts.read_attempt(tmp_path, 1, 0) == (75, "")


def test_the_first_fault_is_the_cause(tmp_path: Path) -> None:
    attempts.record_task(tmp_path, 2, 75, "")
    assert attempts.record_task(tmp_path, 0, 137, "n1: rank 0 killed") == 137
    assert attempts.record_task(tmp_path, 1, 1, "n2: lost its peer") == 1
    assert attempts.read_attempt(tmp_path, 3, 1) == (137, "n1: rank 0 killed")


@pytest.mark.parametrize(("code", "said"), [(-9, "killed by SIGKILL"), (1, "failed with status 1")])
def test_a_starter_that_fails_without_a_word(tmp_path: Path, code: int, said: str) -> None:
    attempt, cause = attempts.read_attempt(tmp_path, 1, code)
    assert attempt == (137 if code == -9 else 1)
    assert said in cause


def test_a_task_that_left_no_word_is_a_fault(tmp_path: Path) -> None:
    attempts.record_task(tmp_path, 0, 0, "")
    assert attempts.read_attempt(tmp_path, 2, 0) == (
        attempts.NO_REPORT,
        "only 1 of 2 tasks recorded an exit status",
    )


def test_who_refuses_lets_rank_0_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "WAIT_FOR_RANK_0_SECONDS", 0.5)
    begun = time.monotonic()
    attempts.report_config_refused(tmp_path, rank_0_refused=False, has_rank_0=False)
    assert time.monotonic() - begun >= 0.5
    attempts.report_config_refused(tmp_path, rank_0_refused=True, has_rank_0=True)
    assert (tmp_path / "said").exists()
    monkeypatch.setattr(attempts, "WAIT_FOR_RANK_0_SECONDS", 60)
    begun = time.monotonic()
    attempts.report_config_refused(tmp_path, rank_0_refused=False, has_rank_0=False)
    assert time.monotonic() - begun < 60
