"""CUDA C++: the sources compile, are compiled once, and say why where they cannot be used."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale_kernels import cuda_library
from xscale_kernels.adamw import cuda as adamw
from xscale_kernels.cuda_library import BuildError, build, refusal
from xscale_kernels.squared_norm import cuda as squared_norm

SOURCES = {"adamw_block": adamw.SOURCE, "squared_norm_block": squared_norm.SOURCE}
OnGpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.nightly), "sm_90"])
@pytest.mark.parametrize("entry", SOURCES)
@pytest.mark.skipif(cuda_library.nvcc() is None, reason="nvcc is neither on PATH nor in /usr/local/cuda/bin")
def test_it_compiles_and_loads(tmp_path: Path, architecture: str, entry: str) -> None:
    made = build(SOURCES[entry], architecture, tmp_path)
    # The runtime inside finds a driver only when a kernel is launched, so this needs no GPU.
    assert getattr(ctypes.CDLL(str(made)), entry)() >= 4096
    assert made.name.startswith(f"{SOURCES[entry].stem}-{architecture}-")


def test_every_source_is_tried() -> None:
    folder = Path(cuda_library.__file__).parent
    assert set(folder.rglob("*.cu")) == set(SOURCES.values())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands in for nvcc: writes its arguments to a file and takes a while."""
    script, said = tmp_path / "nvcc", tmp_path / "said"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo 13.0; exit; fi\necho "$@" >> {said}; sleep 0.2\n'
        'for last; do :; done; grep -q wrong "$7" && { echo "error: wrong" >&2; exit 1; }; echo made > "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(cuda_library, "nvcc", lambda: str(script))
    cuda_library._version.cache_clear()
    yield said
    cuda_library._version.cache_clear()


def test_several_ask_and_one_compiles(tmp_path: Path, compiler: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text("right")
    found: list[Path] = []
    askers = [
        threading.Thread(target=lambda: found.append(build(source, "sm_90", tmp_path / "kept"))) for _ in range(4)
    ]
    for each in askers:
        each.start()
    for each in askers:
        each.join()
    assert len(set(found)) == 1
    assert found[0].read_text() == "made\n"
    assert len(compiler.read_text().splitlines()) == 1
    assert "-arch=sm_90" in compiler.read_text()


def test_a_change_is_compiled_anew(tmp_path: Path, compiler: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text("right")
    first = build(source, "sm_90", tmp_path)
    assert build(source, "sm_90", tmp_path) == first
    assert build(source, "sm_80", tmp_path) != first
    source.write_text("right and newer")
    assert build(source, "sm_90", tmp_path) != first
    assert len(compiler.read_text().splitlines()) == 3


@pytest.mark.usefixtures("compiler")
def test_what_the_compiler_says_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "one.cu"
    source.write_text("wrong")
    with pytest.raises(BuildError, match="error: wrong"):
        build(source, "sm_90", tmp_path)
    assert not list(tmp_path.glob("*.so"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_library, "CACHE", tmp_path)
    reason = refusal(source, OnGpu)
    assert reason is not None
    assert reason.startswith("one.cu could not be built: error: wrong")


def test_without_a_gpu_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(adamw.SOURCE, torch.zeros(1)) == "the tensors are on cpu, CUDA C++ needs a GPU"
    monkeypatch.setattr(cuda_library, "nvcc", lambda: None)
    assert refusal(adamw.SOURCE, OnGpu) == "nvcc is not installed (it comes with the CUDA toolkit)"
