"""CUDA C++ built at first use: nvcc makes a shared library for the GPU that is there, kept by what it was made from.

The sources have a C interface and no header of torch, so one build takes seconds and serves every version of torch.
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
USUAL = Path("/usr/local/cuda/bin/nvcc")
CACHE = Path("~/.cache/xscale/kernels")


class BuildError(RuntimeError):
    """nvcc did not accept a source; the text is what it said."""


@functools.lru_cache(maxsize=1)
def nvcc() -> str | None:
    """Where the compiler is, on PATH or in its usual place."""
    return shutil.which("nvcc") or (str(USUAL) if USUAL.exists() else None)


@functools.lru_cache(maxsize=1)
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def build(source: Path, architecture: str, folder: Path | None = None) -> Path:
    """The shared library of `source` (a .cu file) for an architecture such as sm_90; compiled unless it is kept.

    Several processes may ask at once: one compiles, the others wait for it. Raises BuildError.
    """
    compiler = nvcc()
    if compiler is None:
        raise BuildError("nvcc is not installed")
    folder = (folder or CACHE).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    made_from = "\n".join((source.read_text(encoding="utf-8"), _version(compiler), architecture, *FLAGS))
    stem = f"{source.stem}-{architecture}-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    library = folder / f"{stem}.so"
    with (folder / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = folder / f"{stem}.part"
            command = [compiler, *FLAGS, f"-arch={architecture}", str(source), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode != 0:
                raise BuildError((done.stderr or done.stdout)[-2000:])
            # A name appears only when the file is whole.
            part.rename(library)
    return library


@functools.cache
def _loaded(source: Path, architecture: str) -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL(str(build(source, architecture)))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return f"{source.name} could not be built: {error}"


def _here(source: Path, device: torch.device) -> ctypes.CDLL | str:
    major, minor = torch.cuda.get_device_capability(device)
    return _loaded(source, f"sm_{major}{minor}")


def refusal(source: Path, tensor: torch.Tensor) -> str | None:
    """Why the library of `source` cannot work on `tensor`, or None; builds it where it could."""
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device.type}, CUDA C++ needs a GPU"
    if nvcc() is None:
        return "nvcc is not installed (it comes with the CUDA toolkit)"
    found = _here(source, tensor.device)
    return found if isinstance(found, str) else None


def library(source: Path, device: torch.device) -> ctypes.CDLL:
    """The library, loaded."""
    found = _here(source, device)
    if isinstance(found, str):
        raise BuildError(found)
    return found


def call(function: Callable[..., int], device: torch.device, *arguments: object) -> None:
    """Calls a launcher on the device's current stream. It returns 0, or the number of a CUDA error."""
    with torch.cuda.device(device):
        status = function(*arguments, ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))
    if status:
        raise RuntimeError(f"a CUDA kernel could not be launched (error {status})")
