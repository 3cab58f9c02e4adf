"""Jobs over processes: results, faults and deaths come home."""

import multiprocessing
import os
import signal
import struct
from multiprocessing import Pipe

import pytest

from xscale.core.errors import ConfigError
from xscale.data.parallel_map import _serve, parallel_map


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fault(number: int) -> int:
    if number == 3:
        raise ConfigError("a.txt", "is bad", "Mend it.")
    return number


def crash(number: int) -> int:
    return 1 // (number - 3)


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


MASK = signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""Signals that were blocked when this module was imported."""


def interrupts(number: int) -> tuple[bool, bool, bool]:
    """Whether Ctrl-C waited while this process started, whether it waits now, and whether it ends it without a word."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return signal.SIGINT in MASK, signal.SIGINT in blocked, signal.getsignal(signal.SIGINT) == signal.SIG_DFL


JOBS = [(number,) for number in range(8)]


def test_every_job_is_done_once_elsewhere() -> None:
    found = list(parallel_map(square, JOBS, 3))
    assert sorted(value for value, _ in found) == [number * number for number in range(8)]
    assert os.getpid() not in {process for _, process in found}
    assert {process for _, process in parallel_map(square, JOBS, 1)} == {os.getpid()}
    assert list(parallel_map(square, [], 2)) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_the_users_fault_keeps_its_problems(processes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        list(parallel_map(fault, JOBS, processes))
    (problem,) = caught.value.problems
    assert (problem.path, problem.what, problem.advice) == ("a.txt", "is bad", "Mend it.")


def test_our_fault_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed:.*in crash.*ZeroDivisionError"):
        list(parallel_map(crash, JOBS, 2))


def test_a_process_that_dies_ends_it_with_the_cause() -> None:
    with pytest.raises(RuntimeError, match=r"died \(status -9.*Run the same command again"):
        list(parallel_map(die, JOBS, 2))


def test_ctrl_c_waits_for_processes_that_start() -> None:
    """Their imports would end in tracebacks, and one that is not known yet would not be ended."""
    assert {*parallel_map(interrupts, JOBS, 2)} == {(True, False, True)}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_leaving_early_ends_the_processes() -> None:
    before = set(multiprocessing.active_children())
    results = parallel_map(square, [(number,) for number in range(1000)], 2)
    next(results)
    assert len(set(multiprocessing.active_children()) - before) == 2
    results.close()  # type: ignore[attr-defined]
    assert not set(multiprocessing.active_children()) - before


def test_a_worker_whose_parent_ends_in_the_middle_of_a_message_ends_quietly() -> None:
    parent, child = Pipe()
    os.write(parent.fileno(), struct.pack("!i", 100) + b"half")
    parent.close()
    before = signal.getsignal(signal.SIGINT)
    try:
        _serve(child, print)
    finally:
        signal.signal(signal.SIGINT, before)
