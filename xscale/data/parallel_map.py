"""A parallel map over spawned processes, which end with their parent and pass ConfigErrors to it."""

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from xscale.core.errors import ConfigError

WAIT_SECONDS = 0.5
END_SECONDS = 5.0
"""Time in which an idle process may end by itself, so that libraries in it release what they hold."""


def parallel_map(
    work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[Any]:
    """Yield `work(*job)` for each job as it completes, in any order; in this process when `processes` is 1.

    `work` and the jobs are pickled. When a process dies, the others are stopped and RuntimeError is raised.
    """
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield work(*job)
        return
    with _workers(work, min(processes, len(jobs))) as workers:
        yield from _dispatch(workers, jobs)


def run_in_process(
    work: Callable[..., Any], job: tuple[Any, ...], on_wait: Callable[[], None]
) -> Any:
    """Return `work(*job)`, computed in a spawned process that ends when this call is interrupted.

    `on_wait` is called every WAIT_SECONDS. `work` and the job are pickled. Raises as `parallel_map`.
    """
    with _workers(work, 1) as workers:
        ((connection, process),) = workers.items()
        connection.send(job)
        while not connection.poll(WAIT_SECONDS):
            on_wait()
        return _receive(connection, process)


@contextmanager
def _workers(work: Callable[..., Any], count: int) -> Iterator[dict[Connection, Any]]:
    """Start `count` processes that serve `work`, and end them: the connection to each -> the process."""
    # Forking a process that has threads (torch has) may deadlock the child.
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, work), daemon=True)
            with _without_interrupts():
                with _without_main_module():
                    process.start()
                child_end.close()
                workers[parent_end] = process
        yield workers
        for connection in workers:
            connection.close()
        for process in workers.values():
            process.join(END_SECONDS)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let a Ctrl-C wait, and in a process that is started meanwhile too: it would end its imports in a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the module `__main__` from a process that is started meanwhile.

    Otherwise a worker would first run the user's script, which trains, again, unless it has a main guard.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _dispatch(workers: dict[Connection, Any], jobs: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    waiting = iter(jobs)
    busy = 0
    for connection, job in zip(workers, waiting, strict=False):
        connection.send(job)
        busy += 1
    while busy:
        for connection in _ready(workers):
            result = _receive(connection, workers[connection])
            busy -= 1
            job_or_none = next(waiting, None)
            if job_or_none is not None:
                connection.send(job_or_none)
                busy += 1
            yield result


def _receive(connection: Connection, process: Any) -> Any:
    """Receive the result of a job; raise its ConfigError, and RuntimeError for any other failure."""
    try:
        result, problems, fault = connection.recv()
    except (EOFError, OSError):
        process.join()
        text = f"a worker process died (status {process.exitcode}; -9 often means that memory ran out)."
        raise RuntimeError(f"{text} Run the same command again to resume.") from None
    if problems is not None:
        raise ConfigError(problems)
    if fault is not None:
        raise RuntimeError(f"a worker process failed:\n{fault}")
    return result


def _ready(workers: dict[Connection, Any]) -> list[Connection]:
    ready = wait(list(workers))
    return [connection for connection in workers if connection in ready]


def _serve(connection: Connection, work: Callable[..., Any]) -> None:
    # Ctrl-C reaches the whole process group; only the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            # The parent ended, maybe in the middle of a message.
            return
        try:
            answer = (work(*job), None, None)
        except ConfigError as error:
            answer = (None, error.problems, None)  # type: ignore[assignment]
        except Exception:
            answer = (None, None, traceback.format_exc())  # type: ignore[assignment]
        try:
            connection.send(answer)
        except OSError:
            return
