"""Remains of a killed compilation or a power cut in torch.compile's cache are compiled again, wherever they end."""

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.train.tiny import recipe, run
from xscale.core.errors import ConfigError, FaultError
from xscale.train import compile_cache
from xscale.train import run as training
from xscale.train.compile_cache import CHECKED, ELF_HEADER, SETTLED_SECONDS, remove_incomplete_files

WHOLE = Path(torch.__file__).with_name("lib").joinpath("libshm.so").read_bytes()
_, OFFSET, ENTRY_SIZE, ENTRIES, _ = ELF_HEADER.unpack(WHOLE[: ELF_HEADER.size])
ENDS = [0, 3, 63, 64, 4000, len(WHOLE) // 2, OFFSET + ENTRY_SIZE * ENTRIES - 1]
"""Sizes of incomplete libraries. The section headers end one that a linker wrote; some of torch's have bytes behind."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's cache with one whole library and one file that is no library."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "cwhole.main.so").write_bytes(WHOLE)
    (folder / "ab" / "cwhole.main.cpp").write_text("int main();\n")
    return folder / "ab"


def cut(folder: Path, size: int, age: float = 2 * SETTLED_SECONDS) -> Path:
    """The beginning of a library, last written to `age` seconds ago."""
    file = folder / f"cut{size}.main.so"
    file.write_bytes(WHOLE[:size])
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_libraries_cut_anywhere_are_removed(cache: Path) -> None:
    files = [cut(cache, size) for size in ENDS]
    zeros = cache / "zeros.main.so"
    zeros.write_bytes(bytes(len(WHOLE)))
    os.utime(zeros, (0, 0))
    assert remove_incomplete_files() == sorted([*files, zeros])
    assert sorted(file.name for file in cache.iterdir()) == ["cwhole.main.cpp", "cwhole.main.so"]
    assert remove_incomplete_files() == []


@pytest.mark.parametrize("ending", [".py", ".cpp"])
@pytest.mark.parametrize("content", [b"", bytes(100)], ids=["empty", "zeros"])
def test_sources_that_a_power_cut_left_are_removed(cache: Path, content: bytes, ending: str) -> None:
    (cache / "whole.py").write_text("def call(): ...\n")
    file = cache / f"lost{ending}"
    file.write_bytes(content)
    os.utime(file, (0, 0))
    assert remove_incomplete_files() == [file]
    assert (cache / "whole.py").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=1m,ro", "Read-only file system"),
        ("size=1m,nr_inodes=2", "No space left on device: no inode is left"),
        ("size=32k", "No space left on device"),
    ],
)
def test_a_cache_on_a_disk_that_takes_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"a file system needs the right to mount: {done.stderr.strip()}")
    try:
        if "nr_inodes" in options:
            (folder / "last").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        with pytest.raises(ConfigError, match=rf"the cache of torch\.compile cannot be used: {folder}.*{words}"):
            remove_incomplete_files()
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_library_that_is_being_written_is_waited_for(cache: Path) -> None:
    file = cut(cache, 4000, age=0)
    writer = threading.Timer(0.5, lambda: file.write_bytes(WHOLE))
    writer.start()
    assert remove_incomplete_files() == []
    writer.join()
    assert file.read_bytes() == WHOLE


def test_a_library_that_cannot_be_removed_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cut(cache, 4000)

    def refuse(folder: Path, name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compile_cache, "remove_file", refuse)
    with pytest.raises(FaultError, match=rf"{file}.*incomplete.*Permission denied.*remove {cache}"):
        remove_incomplete_files()


@pytest.mark.parametrize("what", ["a file", "below a file", "a broken link"])
def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    # torch's compiler cannot be imported where it cannot make the folder, and not again in that process.
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    path = tmp_path / "cache"
    path.symlink_to("gone/gone") if what == "a broken link" else path.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path / "below" if what == "below a file" else path))
    with pytest.raises(
        ConfigError, match=r"parallel\.compile: the cache of .* cannot be used: .*TORCHINDUCTOR_CACHE_DIR"
    ):
        remove_incomplete_files()


@pytest.mark.long
def test_a_cache_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "xscale", "train", "quickstart", f"run.dir={tmp_path}", "parallel.compile=true"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be used" in done.stderr


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_looks_at_the_cache_where_it_compiles(
    cache: Path, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cut(cache, 4000)
    monkeypatch.setattr(training, "_train", lambda *_: 0)
    run(recipe(tmp_path, parallel={"compile": compiles}))
    assert file.exists() == (not compiles)
    assert (f"removed {file}, a file of torch.compile's cache" in capsys.readouterr().err) == compiles


PROGRAM = """
import torch
from xscale.train.compile_cache import remove_incomplete_files
removed = remove_incomplete_files()
print(len(removed), torch.compile(lambda x: x.sin().exp() + 1)(torch.zeros(8)).sum().item())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "ending"), [pytest.param(0, ".so", marks=pytest.mark.nightly), (4000, ".so"), (0, "")]
)
def test_torch_compiles_again_what_is_removed(tmp_path: Path, size: int, ending: str) -> None:
    """Files of libraries, or all of the cache but the locks, are removed."""

    def compiled() -> str:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-c", PROGRAM]
        root = Path(__file__).parents[2]
        done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert compiled() == "0 16.0"
    files = [file for file in (tmp_path / "cache").rglob(f"*{ending}") if file.is_file() and file.suffix != ".lock"]
    checked = [file for file in files if file.suffix in CHECKED]
    assert checked
    for file in files:
        file.write_bytes(file.read_bytes()[:size])
        os.utime(file, (0, 0))
    assert compiled() == f"{len(checked)} 16.0"
