"""Profiles of chosen steps of a run: a trace of each rank, the largest operators, memory on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler import record_function as named_range

from xscale.core.atomic_write import write_atomically
from xscale.mesh import torch_private
from xscale.observe.config import ProfileConfig
from xscale.observe.format import percentage, quantity

PROFILES = "profile"
"""Folder of a run with its profiles."""
LARGEST = 10
"""Operators in a table."""
ALLOCATIONS = 1_000_000
"""Most allocations and frees in a memory snapshot, the newest."""


class StepProfiler:
    """Profiles the steps that the config names and writes RUN/profile/step-N, N being the first of them.

    - `rank-R.json.gz`: the trace, for chrome://tracing, Perfetto or TensorBoard's plugin
    - `rank-R.txt`: operators by the time that they take themselves, and by FLOPs
    - `rank-R.memory.pickle`: on a GPU, each allocation of these steps, for pytorch.org/memory_viz

    A profiled step is slower than others.
    """

    def __init__(
        self, config: ProfileConfig | None, run: Path, rank: int, device: torch.device, message: Callable[[str], None]
    ) -> None:
        """`message` gets the table of this rank and the name of the folder."""
        self._config, self._rank, self._device, self._message = config, rank, device, message
        self._folder = Path() if config is None else run / PROFILES / f"step-{config.at:08d}"
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run step `number`, in the body, under the profiler if it is to be profiled; write after the last of them."""
        config = self._config
        if config is None or not config.at <= number < config.at + config.steps:
            yield
            return
        if number == config.at:
            self._start()
        if self._profile is None:  # the run resumed in the middle of them
            yield
            return
        with named_range(f"step {number}"):
            yield
        if number == config.at + config.steps - 1:
            self._write(self._profile)
            self._profile = None

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch_private.record_memory_history(max_entries=ALLOCATIONS)
        self._profile = profile(activities=activities, profile_memory=True, with_flops=True)
        self._profile.start()

    def _write(self, finished: profile) -> None:
        assert self._config is not None
        finished.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._device.type == "cuda":
            torch_private.dump_memory_snapshot(str(self._folder / f"rank-{self._rank}.memory.pickle"))
            torch_private.record_memory_history(enabled=None)
        finished.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        text = operator_table(finished, self._config.steps, on_gpu=self._device.type == "cuda")
        write_atomically(self._folder / f"rank-{self._rank}.txt", text.encode())
        self._message(f"{text}profiled {self._config.steps} step(s); the traces of all ranks are in {self._folder}")


def operator_table(finished: profile, steps: int, *, on_gpu: bool) -> str:
    """The `LARGEST` operators by the time they take themselves, without what they call, and by FLOPs; of one step.

    Times are those of the device that computes: kernels on a GPU, operators on a CPU.
    """
    rows = []
    for event in finished.key_averages():
        # On a GPU a kernel has a row of its own beside that of the operator that starts it.
        if on_gpu and event.device_type.name != "CUDA" and not event.flops:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append((microseconds / 1e6 / steps, event.flops / steps, event.count / steps, event.key))
    total = sum(seconds for seconds, *_ in rows) or 1.0
    lines = [f"{'operator':48} {'ms a step':>10} {'of all':>8} {'calls':>8} {'FLOPs':>8}"]
    for seconds, flops, calls, name in sorted(rows, reverse=True)[:LARGEST]:
        counted = quantity(flops) if flops else "-"
        lines.append(f"{name[:48]:48} {1e3 * seconds:10.2f} {percentage(seconds / total):>8} {calls:8.0f} {counted:>8}")
    counted_rows = sorted(((flops, name) for _, flops, _, name in rows if flops), reverse=True)
    total_flops = sum(flops for flops, _ in counted_rows)
    if total_flops:
        lines.append(f"FLOPs of a step: {quantity(total_flops)}, of products and convolutions that the profiler counts")
        lines += [f"{name[:48]:48} {percentage(flops / total_flops):>10}" for flops, name in counted_rows[:LARGEST]]
    return "\n".join(lines) + "\n"
