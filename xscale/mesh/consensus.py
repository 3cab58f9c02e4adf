"""Consensus of ranks: each rank does its work, every rank learns of any failure, and all raise the same error."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from xscale.core.errors import ConfigError, FaultError

T = TypeVar("T")
R = TypeVar("R")
Failure = FaultError | ConfigError | OSError
"""Failures reported in a sentence; any other exception is a bug and keeps its traceback."""
Explain = Callable[[Path, OSError, str], Exception]
"""Turns an OSError met at a path while the path was being `doing` into the error that all ranks raise."""


def explain_os_error(path: Path, error: OSError, doing: str) -> Exception:
    return FaultError(f"{path}: cannot be {doing}: {error.strerror or error}")


class Consensus:
    """Work that all ranks do together; without a process group, this process alone."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        doing: str = "done",
        explain: Explain = explain_os_error,
        *,
        single_process: bool = False,
    ) -> None:
        """`group` defaults to all ranks; beside NCCL give a gloo group, whose messages never wait for the GPU.

        `doing` is the participle that messages use, such as "written". `single_process` is for a process that works
        without the other ranks of its process group.
        """
        self.group = group
        self.doing = doing
        self.explain = explain
        self.is_single_process = (
            single_process
            or not (dist.is_available() and dist.is_initialized())
            or dist.get_world_size(group) == 1
        )
        self.rank = 0 if self.is_single_process else dist.get_rank(group)
        self.world = 1 if self.is_single_process else dist.get_world_size(group)

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def on_all(self, path: Path, work: Callable[[], T]) -> list[T]:
        """Do `work` on each rank and return every rank's result, by rank; a failure of any rank is raised on all."""
        local = attempt(work)
        results = [local]
        if not self.is_single_process:
            results = [local] * self.world
            with self._peers_required(path):
                dist.all_gather_object(results, local.picklable(), group=self.group)
        return self._values(path, local, results)

    def on_rank0(self, path: Path, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and broadcast its result; its failure is raised on all ranks."""
        local: Result[T] = attempt(work) if self.is_rank0 else Result()
        results = [local.picklable()]
        if not self.is_single_process:
            with self._peers_required(path):
                dist.broadcast_object_list(results, src=self._source(), group=self.group)
        return self._values(path, local, results)[0]

    def gather_then_scatter(
        self, path: Path, work: Callable[[], T], divide: Callable[[list[T]], list[R]]
    ) -> R:
        """Do `work` on each rank, gather the results, `divide` them on rank 0, and scatter the parts: one for each."""
        worked = attempt(work)
        if self.is_single_process:
            divided = attempt(lambda: divide(self._values(path, worked, [worked])))
            return self._values(path, divided, [divided])[0][0]
        gathered = [worked] * self.world if self.is_rank0 else None
        with self._peers_required(path):
            dist.gather_object(worked.picklable(), gathered, dst=self._source(), group=self.group)
        divided = Result()
        if gathered is not None:
            divided = attempt(lambda: divide(self._values(path, worked, gathered)))
        parts = [Result([part]) for part in divided.value or ()] or [
            divided.picklable()
        ] * self.world
        received: list[Result[list[R]]] = [Result()]
        with self._peers_required(path):
            dist.scatter_object_list(
                received, parts if self.is_rank0 else None, src=self._source(), group=self.group
            )
        local: Result[Any] = worked if worked.failure else divided
        return self._values(path, local, received)[0][0]

    @contextmanager
    def _peers_required(self, path: Path) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"lost contact with another rank while this was being {self.doing}; that rank has ended or hangs"
            seen = str(error).partition(". ")[0]
            raise RankError(f"{path}: {what} (seen by rank {self.rank}: {seen})") from error

    def _source(self) -> int:
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def _values(self, path: Path, local: "Result[Any]", results: "list[Result[T]]") -> list[T]:
        if local.failure is not None and not isinstance(local.failure, Failure):
            raise local.failure
        failures = [
            (rank, result.failure)
            for rank, result in enumerate(results)
            if result.failure is not None
        ]
        if not failures:
            return [cast(T, result.value) for result in results]
        if refusals := [failure for _, failure in failures if isinstance(failure, ConfigError)]:
            refusal = ConfigError(
                dict.fromkeys(problem for error in refusals for problem in error.problems)
            )
            refusal.same_on_all_ranks = True
            raise refusal from None
        rank, failure = failures[0]
        if isinstance(failure, OSError):
            who = f" (rank {rank})" if len(results) > 1 else ""
            raise self.explain(path, failure, self.doing + who) from None
        raise failure


class RankError(RuntimeError):
    """Another rank hit a bug (the text has its traceback) or no longer answers."""


@dataclass
class Result(Generic[T]):
    """The value or the failure of one rank's work."""

    value: T | None = None
    failure: Exception | None = None

    def unwrap(self) -> T | None:
        """Return the value, or raise the failure."""
        if self.failure is not None:
            raise self.failure
        return self.value

    def picklable(self) -> "Result[T]":
        """The result with a bug replaced by its traceback's text, because not every exception can be pickled."""
        if self.failure is None or isinstance(self.failure, Failure | RankError):
            return self
        text = "".join(traceback.format_exception(self.failure))
        return Result(failure=RankError(f"another rank failed:\n{text}"))


def attempt(work: Callable[[], T]) -> Result[T]:
    """Do `work` and keep what it raises, so that the other ranks do not wait forever."""
    try:
        return Result(work())
    except Exception as error:
        return Result(failure=error)
