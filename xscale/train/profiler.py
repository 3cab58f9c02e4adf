"""Profiles of chosen steps of a run: a trace of each rank, its largest operators, the slowest ranks, GPU memory."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler import record_function as named_range

from xscale.core.errors import FaultError, counted
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import remove_file
from xscale.core.files.run_files import make_run_folder
from xscale.mesh import torch_private
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo, silence_profiler_log
from xscale.observe.config import ProfileConfig
from xscale.step.phase_timer import PhaseTimer
from xscale.train.profile_tables import (
    LARGEST,
    RankProfile,
    operator_table,
    rank_profile,
    rank_table,
)

PROFILES = "profile"
"""Folder of a run with its profiles."""
RANKS = "ranks.txt"
"""File with the table of all ranks."""
ALLOCATIONS = 1_000_000
"""Most allocations and frees in a memory snapshot, the newest."""


class StepProfiler:
    """Profiles the steps that the config names and writes RUN/profile/step-N, N being the first of them.

    - `ranks.txt`: with several ranks, a row for each of them, the slowest first
    - `rank-R.json.gz`: the trace, for chrome://tracing, Perfetto or TensorBoard's plugin
    - `rank-R.txt`: operators by the time that they take themselves, and by FLOPs
    - `rank-R.memory.pickle`: on a GPU, each allocation of these steps, for pytorch.org/memory_viz

    A profiled step is slower than others. A profile that cannot be written ends no run.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        run: Path,
        rank_info: RankInfo,
        timer: PhaseTimer,
        message: Callable[[str], None],
        beat: Callable[[str], object] = str,
    ) -> None:
        """`message` gets the tables and the name of the folder, `beat` the name of what may take long as it begins."""
        self._config = config
        self._rank = rank_info.rank
        self._timer = timer
        self._message = message
        self._beat = beat
        self._run = run
        self._folder = run if config is None else run / PROFILES / f"step-{config.at:08d}"
        self._first = 0 if config is None else config.at
        self._profile: profile | None = None
        self._finished: profile | None = None
        self._phases_before: dict[str, float] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run step `number`, in the body, under the profiler if it is to be profiled."""
        config = self._config
        if config is None or not self._first <= number < self._first + config.steps:
            yield
            return
        if number == self._first:
            self._start()
        if self._profile is None:  # the run resumed in the middle of them
            yield
            return
        with named_range(f"step {number}"):
            yield
        if number == self._first + config.steps - 1:
            self._finished, self._profile = self._profile, None
            self._finished.stop()

    def is_due(self, *, stopping: bool) -> bool:
        """Whether a profile is to be written; with `stopping` also whether the run stops within its steps."""
        return self._finished is not None or (stopping and self._profile is not None)

    def write_or_repeat(self, next_step: int) -> None:
        """Write the profile; in a run that resumes where one was not written, profile from `next_step` on. Collective:
        the ranks exchange what they have."""
        if self._config is None:
            return
        finished, self._finished = self._finished, None
        if finished is not None:
            self._write(finished, self._config.steps)
        elif self._profile is None:
            self._begin_at(next_step)

    def _begin_at(self, step: int) -> None:
        """Profile from `step` on instead of the config's steps."""
        self._first = step
        self._folder = self._run / PROFILES / f"step-{step:08d}"

    def close(self) -> None:
        """Say so where the run ends before the last of the steps."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
            self._message(
                "the run ends within the steps of observe.profile, of which no profile is written"
            )

    @property
    def _on_gpu(self) -> bool:
        return self._timer.device.type == "cuda"

    def _start(self) -> None:
        if self._profile is not None:  # a rollback led back to the first of them
            self._profile.stop()
        silence_profiler_log()
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch_private.record_memory_history(max_entries=ALLOCATIONS)
            torch.cuda.synchronize(self._timer.device)
        self._phases_before = self._timer.totals()
        self._profile = profile(activities=activities, profile_memory=True, with_flops=True)
        self._profile.start()

    def _write(self, finished: profile, steps: int) -> None:
        self._beat("profile")
        try:
            profiles = Consensus(doing="written").on_all(
                self._folder, lambda: self._write_rank(finished, steps)
            )
        except FaultError as error:
            # Every rank has the same one.
            self._message(f"the profile is not complete: {error}. Training continues")
            return
        where = f"profiled {counted(steps, 'step')}; the traces of all ranks are in {self._folder}"
        if self._rank == 0:
            self._message(
                operator_table(finished, steps, on_gpu=self._on_gpu) + self._ranks(profiles) + where
            )

    def _write_rank(self, finished: profile, steps: int) -> RankProfile:
        """Write the files of this rank and return what it adds to the table of all."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        make_run_folder(self._folder.parent, self._folder.name)
        for name in (f"rank-{self._rank}.memory.pickle", f"rank-{self._rank}.json.gz"):
            # torch opens them by name, and would follow a link.
            remove_file(self._folder, name)
        if self._on_gpu:
            torch.cuda.synchronize(self._timer.device)
            torch_private.dump_memory_snapshot(
                str(self._folder / f"rank-{self._rank}.memory.pickle")
            )
            torch_private.record_memory_history(enabled=None)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        text = operator_table(finished, steps, on_gpu=self._on_gpu)
        write_atomically(self._folder / f"rank-{self._rank}.txt", text.encode())
        before = self._phases_before
        phases = {
            name: seconds - before.get(name, 0.0) for name, seconds in self._timer.totals().items()
        }
        return rank_profile(
            finished, steps, self._rank, platform.node(), phases, on_gpu=self._on_gpu
        )

    def _ranks(self, profiles: list[RankProfile]) -> str:
        """Write the table of all ranks, and return its first rows as text; nothing for one process."""
        if len(profiles) == 1:
            return ""
        write_atomically(self._folder / RANKS, rank_table(profiles).encode())
        text = f"ms a step of each rank, the slowest first:\n{rank_table(profiles, LARGEST)}"
        if len(profiles) > LARGEST:
            text += f"{len(profiles) - LARGEST} more ranks are in {self._folder / RANKS}\n"
        elsewhere = [
            entry for entry in profiles if not (self._folder / f"rank-{entry.rank}.txt").exists()
        ]
        if elsewhere:
            hosts = ", ".join(dict.fromkeys(entry.host for entry in elsewhere))
            text += f"run.dir is not shared by all nodes: the traces of {len(elsewhere)} ranks are on {hosts}\n"
        return text
