"""Commands on a disk that is mounted read-only, has no inode left or no room: done, or a sentence, and nothing lost."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_run_entries import command
from tests.train.tiny import recipe, run
from xscale.checkpoint.search import find_newest
from xscale.core.compose import dump
from xscale.core.config import encode

MODEL = {
    "kind": "decoder",
    "width": 16,
    "position": "rope",
    "tied": False,
    "stack": {
        "depth": 1,
        "block": {
            "mixer": {"kind": "attention", "heads": 2},
            "ffn": {"kind": "gated", "hidden": 32},
            "norm": "rms",
        },
    },
}
"""A model that transformers has too."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, its data and its config."""
    top = tmp_path_factory.mktemp("trained")
    one = recipe(
        top, model=MODEL, train={"steps": 4, "eval_every": 2}, checkpoint={"every_steps": 2}, observe={"report": True}
    )
    assert run(one) == 0
    return top


@pytest.fixture
def disk(tmp_path: Path, trained: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB and 400 entries, with a copy of the run, its data and its config."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=400", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system needs the right to mount: {done.stderr.strip()}")
    try:
        for name in ("run", "data"):
            shutil.copytree(trained / name, folder / name)
        train = {"steps": 6, "eval_every": 2}
        for name in ("run", "new"):
            data = {"folder": f"{folder}/data"}
            one = recipe(folder, name, model=MODEL, train=train, checkpoint={"every_steps": 2}, data=data)
            (folder / f"{name}.yaml").write_text(dump(encode(one)))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def no_inode(disk: Path) -> None:
    for number in range(os.statvfs(disk).f_ffree):
        (disk / f"entry{number}").touch()


def full(disk: Path) -> None:
    with (disk / "filled").open("wb") as file:
        left = os.statvfs(disk)
        file.write(bytes(left.f_bavail * left.f_bsize))


READING = {
    "ls": ["checkpoint", "ls", "RUN"],
    "show": ["checkpoint", "show", "RUN"],
    "verify": ["checkpoint", "verify", "RUN"],
    "eval": ["eval", "RUN", "--sequences", "2"],
    "generate": ["generate", "RUN", "a", "--tokens", "2"],
    "plan": ["plan", "DISK/run.yaml"],
}
WRITING = {
    "train": ["train", "DISK/new.yaml"],
    "resume": ["train", "DISK/run.yaml"],
    "report": ["report", "RUN"],
    "consolidate": ["checkpoint", "consolidate", "RUN", "DISK/weights.safetensors"],
    "export": ["checkpoint", "export", "RUN", "DISK/universal", "--to", "deepspeed-universal"],
    "export to transformers": ["checkpoint", "export", "RUN", "DISK/exported", "--to", "hf"],
    "prune": ["checkpoint", "prune", "RUN", "--keep-last", "1"],
    "prepare": ["data", "prepare", "DISK/run.yaml", "data.folder=DISK/prepared"],
    "stats": ["data", "stats", "DISK/run.yaml", "data.folder=DISK/prepared"],
    "tokenizer": ["data", "tokenizer", "DISK/run.yaml", "data.tokenizer={kind: sentencepiece, vocabulary: 600}"],
    "init": ["init", "quickstart", "--out", "DISK/config.yaml"],
    "a report of two": ["report", "RUN", "RUN", "--output", "DISK/page.html"],
    "prune of bad ones": ["checkpoint", "prune", "RUN", "--bad"],
}
FREES = ("prune", "prune of bad ones")
"""Commands that need no room."""
REASONS: dict[Callable[[Path], None], str] = {
    read_only: r"Read-only file system.*Mount it for writing|Read-only file system.*Let this user|cannot be deleted",
    no_inode: r"No space left on device: no inode is left.*Delete files there",
    full: r"(No space left on device|[\d.]+ \w+ needed, 0 B free).*Free space",
}


@pytest.mark.long
@pytest.mark.parametrize("fill", REASONS, ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_a_command_ends_or_says_why(
    name: str,
    fill: Callable[[Path], None],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (disk / "run" / "checkpoints" / "bad-step-00000003-size").mkdir()
    fill(disk)
    before = {path for path in disk.rglob("*") if path.is_dir()}
    words = [word.replace("RUN", f"{disk}/run").replace("DISK", str(disk)) for word in {**READING, **WRITING}[name]]
    status, lines = command(words, monkeypatch, capsys)
    said = "\n".join(lines)
    assert not any(word in said for word in ("Traceback", "Errno")), said
    if name in READING or (name in FREES and fill is not read_only):
        assert status == 0, said
    else:
        assert status in (1, 2), said
        assert re.search(REASONS[fill], lines[-1]), said
        assert str(disk) in lines[-1]
    # Nothing half-made stays, and nothing that was saved is lost.
    after = {path.name for path in disk.rglob("*") if path.is_dir() and path not in before}
    assert not [name for name in after if name.endswith((".writing", ".part"))]
    assert find_newest(disk / "run" / "checkpoints", hashes=True).step == 4
