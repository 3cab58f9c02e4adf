"""Every path that a whole run opens for writing in its folder, by the interpreter's audit events, is in a table."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_run_entries import NAMES
from tests.train.tiny import recipe, run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.run.run_entries import FILES, FOLDERS, KEPT_CONFIGS

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
BOTH = ("os.rename", "os.link", "os.symlink")
"""Events whose first two arguments are paths."""
ONE = ("os.mkdir", "os.truncate", "os.chmod", "os.mknod", "os.mkfifo")
LISTENERS: list[tuple[str, set[str]]] = []
"""Folders that are listened to, with the paths below them; a hook of the interpreter stays for ever."""


def hook(event: str, given: tuple[Any, ...]) -> None:
    if not LISTENERS or (event != "open" and event not in (*BOTH, *ONE)):
        return
    if event == "open" and not (isinstance(given[2], int) and given[2] & WRITING):
        return
    for path in given[: 2 if event in BOTH else 1]:
        for top, written in LISTENERS:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{top}/"):
                written.add(os.fspath(path)[len(top) + 1 :])


sys.addaudithook(hook)


@contextmanager
def listening(folder: Path) -> Iterator[set[str]]:
    """Collect the paths below `folder` that are opened for writing, made or renamed."""
    written: set[str] = set()
    LISTENERS.append((str(folder), written))
    try:
        yield written
    finally:
        LISTENERS.remove((str(folder), written))


def unlisted(written: set[str]) -> list[str]:
    """Paths whose first name no table of a run's entries has, or no name that the test of all commands plants."""
    names = {re.sub(r"\.\d+\.part$", "", path) for path in written}
    tops = {name for path in names if (name := path.split("/")[0])}
    lacking = [top for top in tops if top not in (*FILES, *FOLDERS) and not fnmatch(top, KEPT_CONFIGS)]
    return sorted(lacking) + sorted(path for path in names if "/" in path and not planted(path))


def planted(path: str) -> bool:
    """Whether an entry of that kind is planted; digits differ from run to run."""
    return alike(path) in set(map(alike, NAMES))


def alike(path: str) -> str:
    """The path of the checkpoint that a folder of a save becomes, with N for digits."""
    return re.sub(r"\d+", "N", re.sub(r"\.(step-\d+)\.(writing|deleting|replaced)", r"\1", path))


def test_what_a_whole_run_opens_is_listed(tmp_path: Path) -> None:
    """All observers, a stop, a resume with another config, and a profile."""
    sections: dict[str, Any] = {
        "checkpoint": {"every_steps": 2, "memory_every_steps": 0, "keep_last": 1},
        "observe": {"tensorboard": True, "report": True, "profile": {"at": 2, "steps": 1}},
    }
    train = {"steps": 4, "batch_size": 2, "micro_batch_size": 2, "eval_every": 2, "eval_sequences": 2}
    with listening(tmp_path / "run") as written:
        assert run(recipe(tmp_path, train={**train, "stop_after": 2}, **sections)) == EXIT_REQUEUE
        assert run(recipe(tmp_path, train=train, **sections)) == EXIT_DONE
    assert {"lock", "metrics.jsonl", "log.txt"} <= written
    assert unlisted(written) == []
    there = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*")}
    assert unlisted(there) == []


@pytest.mark.parametrize("path", ["new.txt", "tokenizer/new.json", "checkpoints/step-00000004/new.json", "new/file"])
def test_a_new_file_is_seen(path: str, tmp_path: Path) -> None:
    """The control."""
    with listening(tmp_path) as written:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert path in written
    assert unlisted(written)
