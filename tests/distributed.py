"""Tests on several ranks: a pool of gloo workers that start once a test run and meet through a file, never a port.

    @distributed(ranks=2)
    def test_sum(tmp_path: Path) -> None:       # runs on both ranks, in a process group of its own
        ...

Arguments (fixtures, parametrised values) are pickled to every rank. A rank's return value is dropped; a test that
wants it, or that chooses its ranks itself, takes the fixture `pool` and calls `pool.run(function, ranks, ...)`.
"""

import functools
import inspect
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import pytest

from tests.worker import MANY_THREADS, Answer, Call

ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)
"""Before any test changes it: workers are forked in one test and used in others."""
TIMEOUT_SECONDS = 600.0
"""A limit for hangs only: a machine that is busy with other work may be many times slower."""
DAMAGED_HEAP = re.compile(
    r"^(malloc|free|realloc|tcache_thread_shutdown|corrupted)\b.*(tcache|chunk|corrupt|size|free)", re.M
)
"""Words of glibc before it aborts a process in whose heap it finds damage."""
LOST_CONNECTION = re.compile(r"Gloo connectFullMesh failed .*Connection closed by peer")
"""Words of gloo where a group cannot be made, since a connection between two ranks was lost."""
GRACE_SECONDS = 20.0
"""Time that the other ranks get to end by themselves once one has failed."""


def distributed(*, ranks: int, timeout_seconds: float = TIMEOUT_SECONDS) -> Callable[[Callable[..., None]], Any]:
    """Run the decorated module-level test function on `ranks` gloo ranks; it fails when any of them does."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def test(*, pool: Pool, **arguments: Any) -> None:
            pool.run(function, ranks, timeout_seconds=timeout_seconds, **arguments)

        signature = inspect.signature(function)
        pool = inspect.Parameter("pool", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), pool], return_annotation=None
        )
        return test

    return decorate


class RankError(Exception):
    """At least one rank failed; the text has each failed rank's traceback or stack, and what it printed.

    It is no AssertionError: a negative control expects one of its comparison, not of a rank that cannot even run.
    """

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(texts.items())))


class ForkServer:
    """A process that has imported torch and the trainer, and forks workers (tests/worker.py)."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "launch")]
        environment = {
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker", str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def fork(self, connection: Connection, log: IO[bytes]) -> int:
        """Process id of a new worker that is called through `connection` and writes to `log`."""
        socket.send_fds(self.socket, [b"fork"], [connection.fileno(), log.fileno()])
        return self._answer()

    def exit_status(self, process: int) -> int:
        """Wait for the end of a worker and return its exit status, which is negative after a signal."""
        self.socket.send(str(process).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self.socket.recv(64)
        assert answer, "the fork server of the tests ended; its output is on stderr"
        return int(answer)


@functools.cache
def fork_server(parity: int) -> ForkServer:
    """One server for even ranks and one for odd: hash seeds differ, as those of the ranks of a real run do."""
    assert parity in (0, 1)
    return ForkServer()


class Worker:
    """One process of the pool."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.log = folder / f"worker-{rank}-{time.monotonic_ns()}.log"
        self.mark = 0
        self.connection, theirs = Pipe()
        self.server = fork_server(rank % 2)
        with self.log.open("wb") as log:
            self.process = self.server.fork(theirs, log)
        self.descriptor = os.pidfd_open(self.process)
        self.status: int | None = None
        theirs.close()

    def exit_status(self, timeout_seconds: float) -> int | None:
        """The exit status, waited for; None if the process still runs after that."""
        if self.status is None and wait([self.descriptor], timeout_seconds):
            self.status = self.server.exit_status(self.process)
        return self.status

    def send(self, call: Call) -> None:
        self.mark = self.log.stat().st_size
        signal.pidfd_send_signal(self.descriptor, signal.SIGCONT)
        self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> Answer:
        """The answer that is there; the end of the process is an answer too."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return Answer(error=f"the process ended with status {self.exit_status(GRACE_SECONDS)}")
        return answer

    def printed(self) -> str:
        """Output of the process since the last call began."""
        with self.log.open("rb") as log:
            log.seek(self.mark)
            text = log.read().decode(errors="replace").strip()
        return f"\nIt printed:\n{text[-6000:]}" if text else ""

    def stacks(self) -> str:
        """Where the process stands, then the end of it."""
        if self.exit_status(0) is None:
            signal.pidfd_send_signal(self.descriptor, signal.SIGQUIT)
            time.sleep(0.3)
        self.end()
        return self.printed()

    def stop(self) -> None:
        """Stop the process until the next call: gloo's threads, a dozen a process, wake 100 times a second."""
        signal.pidfd_send_signal(self.descriptor, signal.SIGSTOP)

    def end(self) -> None:
        if self.connection.closed:
            return
        self.connection.close()
        if self.exit_status(0) is None:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            while self.exit_status(GRACE_SECONDS) is None:
                pass
        os.close(self.descriptor)


class Pool:
    """Workers, started when first asked for and kept until `close`.

    One that hung or died is replaced, and one that has more than `MANY_THREADS` threads.

    Once in a life of the pool a call is repeated, with a warning in pytest's summary: when gloo lost a connection
    while it made a group, and no rank tells another error, or when glibc aborted a worker in whose heap it found
    damage. Two such aborts were seen in dozens of runs of all tests, one as a thread of gloo ended and one in a wait
    for a collective. Nothing of ours writes to memory itself on a CPU, and neither valgrind nor AddressSanitizer nor
    an allocator that checks freed blocks saw the write. A second abort fails its test.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._workers: list[Worker] = []
        self._repeated = False

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *positional: Any,
        timeout_seconds: float = TIMEOUT_SECONDS,
        **arguments: Any,
    ) -> list[Any]:
        """Call the module-level `function` on ranks 0 .. ranks - 1 and return what each returned, by rank.

        Raises RankError when one fails, dies, or is not done in `timeout_seconds`; skips when one skips.
        """
        assert "." not in function.__qualname__, f"{function.__qualname__}: only a module-level function can travel"
        errors = {}
        for _ in range(2):
            answers = self._call(function, ranks, positional, arguments, timeout_seconds)
            errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
            damaged = [error for error in errors.values() if DAMAGED_HEAP.search(error)]
            # Not beside an error that explains it: a rank that dies closes its connections.
            lost = bool(errors) and all(map(LOST_CONNECTION.search, errors.values()))
            if not (damaged or lost) or self._repeated:
                break
            self._repeated = True
            cause = "glibc aborted a worker" if damaged else "gloo lost a connection"
            first = next(iter(damaged or errors.values()))
            warnings.warn(f"repeated {function.__qualname__}: {cause}:\n{first}", stacklevel=2)
        if errors:
            raise RankError(errors)
        skipped = [answer.skipped for answer in answers.values() if answer.skipped is not None]
        if skipped:
            pytest.skip(skipped[0])
        return [answers[rank].result for rank in range(ranks)]

    def _call(
        self, function: Callable[..., Any], ranks: int, positional: Any, arguments: Any, timeout_seconds: float
    ) -> dict[int, Answer]:
        while len(self._workers) < ranks:
            self._workers.append(Worker(Path(self._folder.name), len(self._workers)))
        store = tempfile.mktemp(prefix="store-", dir=self._folder.name)
        workers = dict(enumerate(self._workers[:ranks]))
        for rank, worker in workers.items():
            where = (function.__module__, function.__qualname__)
            worker.send(Call(where, positional, arguments, rank, ranks, store, timeout_seconds))
        return self._gather(workers, timeout_seconds)

    def _gather(self, workers: dict[int, Worker], timeout_seconds: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + timeout_seconds
        while len(answers) < len(workers):
            waiting = {worker.connection: rank for rank, worker in workers.items() if rank not in answers}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                answer = workers[rank].receive()
                if answer.error is not None:
                    answer.error += workers[rank].printed()
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                answers[rank] = answer
            if not ready:
                failed = any(answer.error for answer in answers.values())
                why = "it did not end after another rank failed" if failed else f"not done in {timeout_seconds:g} s"
                for rank in waiting.values():
                    answers[rank] = Answer(error=f"{why}, killed. It stood at:{workers[rank].stacks()}")
        for rank, worker in workers.items():
            if worker.connection.closed or worker.exit_status(0) is not None or answers[rank].threads > MANY_THREADS:
                worker.end()
                # In the same place: a process keeps its rank, because torch keeps meshes, with the coordinates of the
                # rank it had, in caches that outlive process groups.
                self._workers[rank] = Worker(Path(self._folder.name), rank)
            else:
                worker.stop()
        return answers

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._folder.cleanup()
