"""The worker processes of `xscale bench gpu`: one that runs cases, and one that is ready to take its place."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Any

from xscale.core.files.file_safety import decode_json

POLL_SECONDS = 0.2


class WorkerEndedError(RuntimeError):
    """The worker process ended; the message says how."""


class GpuWorker:
    """A process of `xscale.bench.gpu.worker`, with what it starts itself in a process group of its own."""

    def __init__(self, options: Mapping[str, Any], log: Path, folder: Path) -> None:
        self._events, descriptor = os.pipe()
        command = [
            sys.executable,
            "-u",
            "-m",
            "xscale.bench.gpu.worker",
            str(descriptor),
            dumps(options),
        ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        os.close(descriptor)
        self._buffer = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Ask for something; the events that follow end with one that has `done`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((dumps(message) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerEndedError(self._ending()) from None

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event; None once the monotonic clock passes `deadline`. WorkerEndedError if it ended."""
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            readable, _, _ = select.select([self._events], [], [], min(POLL_SECONDS, remaining))
            # Processes that it started may keep the pipe open after it ended.
            if not readable and self._process.poll() is not None:
                raise WorkerEndedError(self._ending())
            if readable:
                content = os.read(self._events, 1 << 16)
                if not content:
                    raise WorkerEndedError(self._ending())
                self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = decode_json(line)
        return event

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._events)

    def _ending(self) -> str:
        code = self._process.wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class WorkerPool:
    """The worker that runs cases; another one imports what it needs meanwhile, so that a crash costs no time."""

    def __init__(self, options: Mapping[str, Any], logs: Path, folder: Path) -> None:
        self._options = options
        self._logs = logs
        self._folder = folder
        self._count = 0
        self._current: GpuWorker | None = None
        self._spare: GpuWorker | None = None

    def worker(self, deadline: float) -> GpuWorker:
        """Return a worker that is ready. TimeoutError, or WorkerEndedError if it cannot start."""
        if self._current is None:
            self._current = self._spare or self._start()
            self._spare = None
            if self._current.receive(deadline) is None:
                raise TimeoutError("the worker process did not start in time")
            self._spare = self._start()
        return self._current

    def discard(self) -> None:
        """End the worker; the next call of `worker` returns another one."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def close(self) -> None:
        """End all workers."""
        for worker in (self._current, self._spare):
            if worker is not None:
                worker.kill()
        self._current = self._spare = None

    def _start(self) -> GpuWorker:
        self._count += 1
        return GpuWorker(self._options, self._logs / f"worker-{self._count}.log", self._folder)
