"""Environment of a benchmark: device, versions, commit and date, which are part of its recorded result."""

import datetime
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from xscale.observe.events import source_commit

ROOT = Path(__file__).parents[2]


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


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name, the versions of torch, transformers and Python, the commit and the date (UTC)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = "not installed"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers,
        "python": platform.python_version(),
        "commit": source_commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
    }
