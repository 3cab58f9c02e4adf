"""Environment of a benchmark: device, versions, commit and date, which are part of its recorded result."""

import datetime
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from xscale.bench.harness.timing import Sample, Timings, clock_of, host_clock
from xscale.core.errors import ConfigError
from xscale.observe.events import source_commit

ROOT = Path(__file__).parents[3]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BenchDevice:
    """Device and precision of a benchmark. On a CPU the figure is CPU time on one thread, on a GPU the wall time."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, device: str, dtype: str) -> "BenchDevice":
        """Read the options --device and --dtype; ConfigError for a device or precision that is not there."""
        if device not in ("cpu", "cuda"):
            raise ConfigError("--device", f"must be cpu or cuda, got '{device}'")
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--device", "torch finds no GPU on this machine", "Take --device cpu."
            )
        if dtype not in DTYPES:
            raise ConfigError("--dtype", f"there is no '{dtype}'", f"Take {' or '.join(DTYPES)}.")
        return cls(torch.device(device), DTYPES[dtype])

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def clock(self) -> Callable[[Callable[[], object]], Sample]:
        """A clock that waits for the device."""
        return clock_of(self.device) if self.on_gpu else host_clock()

    def seconds(self, timings: Timings, side: str) -> float:
        """Return the median wall time on a GPU; on a CPU the shortest CPU time: other programs only add to it."""
        return timings.median(side) if self.on_gpu else timings.fastest(side, "processor_seconds")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, with denormal numbers taken as 0, until the end of the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name, the versions of torch, transformers and Python, the commit and the date (UTC)."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": version("transformers") or "not installed",
        "python": platform.python_version(),
        "commit": source_commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
    }
