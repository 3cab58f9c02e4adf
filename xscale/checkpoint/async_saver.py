"""Asynchronous saving: training waits only for a copy of the state; a thread writes the copy to disk.

At most one save is in flight, on a process group of its own, so that its messages never meet those of training.
"""

import errno
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import CheckpointError, consensus
from xscale.checkpoint.files import step_folder
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.checkpoint.planner import Box, CheckpointPlan, local_shards, outline, plan_save
from xscale.checkpoint.save import Snapshot, encode, write
from xscale.checkpoint.staging import Staging
from xscale.mesh.collectives import sum_scalars
from xscale.mesh.consensus import Result, attempt
from xscale.mesh.flat_shard import FlatShard

ABANDON_SECONDS = 60.0
"""Time that a save in flight gets to end when the run fails."""
REPORT_SECONDS = 1.0
"""Time between two calls of `on_wait`."""


@dataclass(frozen=True)
class SaveStarted:
    """How long training waited to start a save."""

    step: int
    skipped: bool
    """Skipped: the previous save is still in flight and `when_busy` is "skip"."""
    wait_seconds: float
    """Time spent waiting for the previous save."""
    copy_seconds: float

    @property
    def stall_seconds(self) -> float:
        return self.wait_seconds + self.copy_seconds


@dataclass(frozen=True)
class SaveFinished:
    """A save that succeeded or failed."""

    step: int
    path: Path | None
    """None when the save failed."""
    error: CheckpointError | None
    seconds: float
    """From the copy to the rename."""
    in_memory: bool = False
    """Whether it is an in-memory checkpoint."""


class AsyncSaver:
    """Saves of one run. Every method but `finished` and `wait_copied` is collective: all ranks call it at one step."""

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        keep_last: int | None = None,
        keep_every: int | None = None,
        failure_limit: int = 0,
        disk: Disk | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`group`: a gloo group of all ranks that nothing else uses; required with more than one rank.

        `device`: where the default group's collectives take tensors; None: the CPU.

        `when_busy`: what a save does while the previous one is in flight. `failure_limit`: number of consecutive
        failures that are only reported (by `finished`); the next one is raised.
        """
        self._folder = folder
        self._when_busy = when_busy
        self._failure_limit = failure_limit
        self._retention = (keep_last, keep_every)
        self._ranks = consensus(group)
        assert self._ranks.is_single_process or group is not None, (
            "asynchronous saves need their own process group"
        )
        self._disk = disk or Disk()
        self._device = device or torch.device("cpu")
        self._plan: CheckpointPlan | None = None
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._last: SaveFinished | BaseException | None = None
        self._finished: queue.SimpleQueue[SaveFinished] = queue.SimpleQueue()
        self._failures = 0
        self._in_memory = False
        self._copy_done = threading.Event()
        self._copy_done.set()
        self.on_wait: Callable[[int], object] = lambda operations: None
        """Called every REPORT_SECONDS while the caller waits for a save, with the disk operations begun so far."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | Box | FlatShard],
        state: dict[str, Any],
        config: dict[str, Any],
        *,
        required: bool = False,
        copy_in_background: bool = False,
        in_flight: bool | None = None,
    ) -> SaveStarted:
        """Copy the state, start to write it in the background, and return. Arguments as in `save.save`.

        With `copy_in_background` the copy is made in the background too: the caller must call `wait_copied` before any
        of the tensors changes, in training before the next optimizer step. A `required` save, such as the last one of a
        run, is never skipped. `in_flight`: whether `is_writing` was true on any rank a moment ago, the same on all of
        them; None: they are asked. CheckpointError when more than `failure_limit` consecutive saves failed.
        """
        start = time.perf_counter()
        if (
            self._when_busy == "skip"
            and not required
            and (self._in_flight() if in_flight is None else in_flight)
        ):
            return SaveStarted(step, True, time.perf_counter() - start, 0.0)
        self.wait()
        copy_start = time.perf_counter()
        shards = local_shards(tensors)
        plan = self._plan_for(shards, step_folder(self._folder, step))
        state_bytes, config_bytes = encode(state), encode(config)
        copy_done = self._copy_done = threading.Event()

        def copy() -> Snapshot:
            try:
                return Snapshot(
                    step, plan, self._staging.copy(plan.items, shards), state_bytes, config_bytes
                )
            finally:
                copy_done.set()

        # Copies from a GPU are only queued, and only the thread that queues the steps queues them in the right order.
        deferred = copy_in_background and not any(shard.local.is_cuda for shard in shards.values())
        snapshot = copy if deferred else _constant(copy())
        self._start_thread(partial(self._write, step, snapshot), in_memory=False)
        return SaveStarted(step, False, copy_start - start, time.perf_counter() - copy_start)

    def prepare(self, tensors: Mapping[str, Tensor | Box | FlatShard]) -> None:
        """Plan the saves of these tensors and get their memory, so that the first save does not wait for either."""
        shards = local_shards(tensors)
        self._staging.prepare(self._plan_for(shards, self._folder).items, shards)

    def save_in_memory(
        self,
        memory: InMemoryCheckpoint,
        step: int,
        tensors: Mapping[str, Tensor | Box | FlatShard],
        state: dict[str, Any],
    ) -> SaveStarted:
        """Copy the state into memory that outlives this process and return; commit the copy in the background."""
        start = time.perf_counter()
        self.wait()
        copy_start = time.perf_counter()
        copied = attempt(partial(memory.copy, tensors))
        self._start_thread(
            partial(self._commit_in_memory, memory, step, copied, dict(tensors), state),
            in_memory=True,
        )
        return SaveStarted(step, False, copy_start - start, time.perf_counter() - copy_start)

    def wait_copied(self) -> float:
        """Wait until the tensors of the last save may change again; return the seconds waited. Not collective."""
        start = time.perf_counter()
        self._copy_done.wait()
        self._staging.hold_update()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until no save is in flight. CheckpointError when more than `failure_limit` consecutive saves failed."""
        self._join(None)
        last, self._last = self._last, None
        if isinstance(last, BaseException):
            raise last
        if last is None:
            return
        self._failures = 0 if last.error is None else self._failures + 1
        if last.error is not None and self._failures > self._failure_limit:
            raise last.error

    def close(self) -> Path | None:
        """Wait for the last save and return its path; CheckpointError when it failed, whatever the limit."""
        self._join(None)
        last = self._last
        self.wait()
        assert not isinstance(last, BaseException)
        if last is not None and last.error is not None:
            raise last.error
        return None if last is None else last.path

    def finished(self) -> list[SaveFinished]:
        """Return the saves that finished since the last call; ranks may see one at different steps."""
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        return finished

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the last save; after a failure of the run only ABANDON_SECONDS, since a lost rank never answers.

        The traceback comes first, as the launcher may kill this rank before the wait is over.
        """
        if error is None:
            self.close()
            return
        if self._thread is not None and self._thread.is_alive():
            traceback.print_exception(error)
            sys.stderr.flush()
        self._join(ABANDON_SECONDS)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes a save to disk."""
        return self._thread is not None and self._thread.is_alive() and not self._in_memory

    def _in_flight(self) -> bool:
        """Whether any rank still writes to disk."""
        return self._is_true_of_any(self.is_writing)

    def _is_true_of_any(self, fact: bool) -> bool:
        """Ask all ranks over the default group, where it is one small all-reduce; the threads may use the other."""
        return (
            fact
            if self._ranks.is_single_process
            else sum_scalars([float(fact)], self._device)[0] > 0
        )

    def _plan_for(self, shards: dict[str, Box | FlatShard], path: Path) -> CheckpointPlan:
        """Return the plan of the previous save unless the layout of some rank changed."""
        changed = self._plan is None or self._plan.outline != outline(shards)
        # The first plan is made by all ranks at the same save.
        if self._plan is None or self._is_true_of_any(changed):
            self._plan = plan_save(shards, path, self._ranks)
        return self._plan

    def _join(self, seconds: float | None) -> None:
        if self._thread is None:
            return
        end = time.monotonic() + (threading.TIMEOUT_MAX if seconds is None else seconds)
        while self._thread.is_alive() and (seconds_left := end - time.monotonic()) > 0:
            self._thread.join(min(seconds_left, REPORT_SECONDS))
            self.on_wait(self._disk.operations)
        self._thread = None

    def _start_thread(self, work: Callable[[], SaveFinished], *, in_memory: bool) -> None:
        self._in_memory = in_memory
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], SaveFinished]) -> None:
        try:
            with torch.no_grad():
                finished = work()
        except BaseException as fault:
            self._last = fault
            return
        self._last = finished
        self._finished.put(finished)

    def _write(self, step: int, take_snapshot: Callable[[], Snapshot]) -> SaveFinished:
        start = time.perf_counter()
        path, error = None, None
        try:
            snapshot = take_snapshot()
            self._staging.wait()
            self._ranks.on_rank0(self._folder, self._require_run_folder)
            path = write(self._folder, snapshot, self._ranks, self._disk, *self._retention)
        except CheckpointError as failure:
            error = failure
        return SaveFinished(step, path, error, time.perf_counter() - start)

    def _require_run_folder(self) -> None:
        """FileNotFoundError where it is gone: made anew, it would have a checkpoint and none of the run's files."""
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {self._folder.parent}")

    def _commit_in_memory(
        self,
        memory: InMemoryCheckpoint,
        step: int,
        copied: Result[None],
        tensors: dict[str, Tensor | Box | FlatShard],
        state: dict[str, Any],
    ) -> SaveFinished:
        start = time.perf_counter()
        path, error = None, None
        try:
            self._ranks.on_all(memory.folder, copied.unwrap)
            path = memory.commit(step, tensors, state)
        except CheckpointError as failure:
            error = failure
        return SaveFinished(step, path, error, time.perf_counter() - start, in_memory=True)


def _constant(snapshot: Snapshot) -> Callable[[], Snapshot]:
    return lambda: snapshot
