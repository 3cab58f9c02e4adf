"""One rank of the pool in tests/distributed.py: takes calls from a pipe, each in a process group of its own.

`python -m tests.worker FD` is a fork server: it imports torch and the trainer once, and forks a worker for each request
on the socket FD. A worker so begins within milliseconds, and a replaced one does.
"""

import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

MANY_THREADS = 40
"""Threads above which a worker is replaced.

DTensor's caches hold every mesh that a test has had, and so its groups, and so three threads a group. gloo's wake a
hundred times a second: with a thousand of them after a few hundred layouts a test takes minutes. To end the process is
quick, and safe: emptying the caches ended threads of gloo by the dozen, and one found its heap damaged.
"""


@dataclass
class Call:
    """Work of a rank."""

    function: tuple[str, str]
    """Module and name."""
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    rank: int
    ranks: int
    store: str
    """The file through which the ranks meet."""
    timeout_seconds: float


@dataclass
class Answer:
    """Result or failure of a rank's work."""

    result: Any = None
    error: str | None = None
    skipped: str | None = None
    threads: int = 0
    """Threads that the process has now."""


def answer(call: Call) -> Answer:
    """Run the call; whatever it raises is in the answer."""
    import pytest

    try:
        module, name = call.function
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        result = within_group(function, call)
        pickle.dumps(result)
    except pytest.skip.Exception as skip:
        return Answer(skipped=str(skip))
    except BaseException:  # a test may raise SystemExit, and pytest's own outcomes are no Exceptions
        return Answer(error=traceback.format_exc())
    return Answer(result=result)


def within_group(function: Any, call: Call) -> Any:
    """The function's result, in a fresh default process group and with fresh random numbers."""
    import torch
    import torch.distributed as dist

    local = {"RANK": call.rank, "WORLD_SIZE": call.ranks, "LOCAL_RANK": call.rank, "LOCAL_WORLD_SIZE": call.ranks}
    os.environ.update({name: str(value) for name, value in local.items()})
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    store = dist.FileStore(call.store, call.ranks)  # type: ignore[attr-defined]
    wait = timedelta(seconds=call.timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.ranks, timeout=wait)
    # A rank whose function talks to nobody would else leave while others still connect to it, and they fail.
    dist.barrier()
    try:
        return function(*call.positional, **call.arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def threads() -> int:
    """How many threads this process has; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def work(connection: Connection) -> None:
    """Answer calls until the test run is over."""
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            done = answer(pickle.loads(call))
        except Exception:  # the arguments could not be read here
            done = Answer(error=traceback.format_exc())
        done.threads = threads()
        connection.send_bytes(pickle.dumps(done))


def end_with_the_parent() -> None:
    """Be killed when the fork server ends: a stopped worker would never see that its pipe is closed."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def serve(requests: socket.socket) -> None:
    """Fork a worker for each pipe and log file that arrive, and return the wait status for each process id."""
    for module in ("pytest", "torch._dynamo", "torch.distributed.fsdp", "xscale.train.run"):
        importlib.import_module(module)
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 64, 2)
        if not message:  # the test run is over
            return
        if not descriptors:
            status = os.waitpid(int(message), 0)[1]
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pipe, log = descriptors
        process = os.fork()
        if process == 0:
            end_with_the_parent()
            requests.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            work(Connection(pipe))
            sys.stdout.flush()
            os._exit(0)
        os.close(pipe)
        os.close(log)
        requests.send(str(process).encode())


if __name__ == "__main__":
    # So that what is pickled in a worker is read as tests.worker's in the test.
    importlib.import_module("tests.worker").serve(socket.socket(fileno=int(sys.argv[1])))
