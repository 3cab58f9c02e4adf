"""CUDA C++ compiled at first use: nvcc builds a shared library for the present GPU, cached by the hash of its inputs.

The sources have a C interface and include no header of torch, so a build takes seconds and works with every torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
CACHE = Path("~/.cache/xscale/kernels")


class BuildError(RuntimeError):
    """nvcc failed to compile a source; the message is its output."""


@functools.lru_cache(maxsize=1)
def nvcc() -> str | None:
    """Path of the compiler, from PATH or its default location; None if it is not installed."""
    return shutil.which("nvcc") or (str(DEFAULT_NVCC) if DEFAULT_NVCC.exists() else None)


@functools.lru_cache(maxsize=1)
def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout


def build(source: Path, architecture: str, folder: Path | None = None) -> Path:
    """Compile `source` (a .cu file) for an architecture such as sm_90, unless it is cached; return the shared library.

    Of several processes at once, one compiles and the others wait for it. Raises BuildError.
    """
    compiler = nvcc()
    if compiler is None:
        raise BuildError("nvcc is not installed")
    folder = (folder or CACHE).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    build_inputs = "\n".join(
        (source.read_text(encoding="utf-8"), _version(compiler), architecture, *FLAGS)
    )
    stem = f"{source.stem}-{architecture}-{hashlib.sha256(build_inputs.encode()).hexdigest()[:16]}"
    library = folder / f"{stem}.so"
    with (folder / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = folder / f"{stem}.part"
            command = [compiler, *FLAGS, f"-arch={architecture}", str(source), "-o", str(part)]
            completed = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=600
            )
            if completed.returncode != 0:
                raise BuildError((completed.stderr or completed.stdout)[-2000:])
            # The name appears only once the file is complete.
            part.rename(library)
    return library


@functools.cache
def _loaded(source: Path, architecture: str) -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL(str(build(source, architecture)))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return f"{source.name} could not be built: {error}"


def _library_for(source: Path, device: torch.device) -> ctypes.CDLL | str:
    major, minor = torch.cuda.get_device_capability(device)
    return _loaded(source, f"sm_{major}{minor}")


def refusal(source: Path, tensor: torch.Tensor) -> str | None:
    """Reason why the library of `source` cannot process `tensor`, or None; compiles the library if needed."""
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device.type}, CUDA C++ needs a GPU"
    if nvcc() is None:
        return "nvcc is not installed (it comes with the CUDA toolkit)"
    loaded = _library_for(source, tensor.device)
    return loaded if isinstance(loaded, str) else None


def library(source: Path, device: torch.device) -> ctypes.CDLL:
    """Load the library. Raises BuildError."""
    loaded = _library_for(source, device)
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def call(function: Callable[..., int], device: torch.device, *arguments: object) -> None:
    """Call a launcher on the device's current stream. Raises RuntimeError with the number of a CUDA error."""
    with torch.cuda.device(device):
        status = function(
            *arguments, ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        )
    if status:
        raise RuntimeError(f"a CUDA kernel could not be launched (error {status})")
