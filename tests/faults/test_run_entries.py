"""A run folder from anybody: what stands in the place of a run's file is refused in a sentence, and nothing outside of
the folder changes."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dying import save_step
from tests.faults.planted_entries import (
    KINDS,
    dangling_link,
    fifo,
    file,
    folder,
    link_to_file,
    unix_socket,
)
from tests.train.tiny import recipe, run
from xscale.checkpoint.search import find_newest
from xscale.checkpoint.tools import tools
from xscale.core.compose import dump
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_lock import FileLock
from xscale.core.files.run_files import IrregularFileError, make_run_folder, open_run_file
from xscale.run.run_entries import FILES, FOLDERS, LINKABLE, check_entries
from xscale.run.run_folder import open_folder

NESTED = tuple(
    f"checkpoints/{name}"
    for name in ("step-00000004", ".step-00000006.writing", ".step-00000006.replaced", ".step-00000002.deleting")
)
"""Entries of folders of the run that another save would rename or make."""


OWN = (file, folder)
"""Entries that a run itself writes in the place of a file, and of a folder."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` of four steps, all observers on, and its config."""
    parent = tmp_path_factory.mktemp("trained")
    one = recipe(
        parent,
        train={"steps": 4, "eval_every": 2},
        checkpoint={"every_steps": 2, "memory_every_steps": 0},
        observe={"tensorboard": True, "report": True, "profile": {"at": 2, "steps": 1}},
    )
    assert run(one) == 0
    return parent


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files and folders of somebody else."""
    other = tmp_path / "outside"
    (other / "folder" / "step-00000001").mkdir(parents=True)
    (other / "file").write_text("yours\n")
    (other / "folder" / "file").write_text("yours\n")
    return other


def contents(top: Path) -> dict[str, Any]:
    """Each path below `top`, with content, mode and times."""
    known = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        times = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode)
        known[str(path)] = (times, path.read_bytes() if path.is_file() else None)
    return known


def command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Exit status and lines on standard error of `xscale` with these words."""
    from xscale.cli.main import main

    monkeypatch.setattr(sys, "argv", ["xscale", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    return (0 if code is None else int(code)), capsys.readouterr().err.splitlines()


def config_file(top: Path, run_folder: Path, **sections: Any) -> Path:
    one = recipe(top, run_folder.name, **{"checkpoint": {"every_steps": 2}, **sections})
    path = top / "config.yaml"
    path.write_text(dump(encode(one)))
    return path


@pytest.mark.long
def test_what_a_run_writes_is_listed(trained: Path) -> None:
    """A new entry of a run folder needs its line in the table, by which it is looked at."""
    written = {path.name: path.is_dir() for path in (trained / "run").iterdir()}
    assert {name for name, is_folder in written.items() if is_folder} <= set(FOLDERS)
    assert {name for name, is_folder in written.items() if not is_folder} <= set(FILES)
    assert set(written) >= {"checkpoints", "tensorboard", "profile", "tokenizer", "metrics.jsonl", "log.txt", "lock"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*FILES, "config.step-2.yaml", *FOLDERS])
def test_what_is_not_a_runs_own_is_seen(
    name: str, kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path, limit_seconds: None
) -> None:
    kind(tmp_path / name, outside)
    before = contents(outside)
    problems = check_entries(tmp_path, ())
    assert contents(outside) == before
    assert [problem.path for problem in problems] == ([] if kind is OWN[name in FOLDERS] else [f"{tmp_path / name}"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_does_not_begin_beside_it(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path, limit_seconds: None
) -> None:
    (tmp_path / "run").mkdir()
    kind(tmp_path / "run" / "metrics.jsonl", outside)
    kind(tmp_path / "run" / "tensorboard", outside)
    before = contents(outside)
    with pytest.raises(ConfigError, match=r"this is .*, not a f.*, so the run would write elsewhere or not at all"):
        open_folder(recipe(tmp_path))
    assert contents(outside) == before


READERS: dict[str, Callable[[Path, Path], list[str]]] = {
    "train": lambda run, top: ["train", str(top / "config.yaml"), "train.steps=6"],
    "report": lambda run, top: ["report", str(run)],
    "reports of two": lambda run, top: ["report", str(run), str(run), "--output", str(top / "page.html")],
    "eval": lambda run, top: ["eval", str(run)],
    "generate": lambda run, top: ["generate", str(run), "a", "--tokens", "2"],
    "ls": lambda run, top: ["checkpoint", "ls", str(run)],
    "show": lambda run, top: ["checkpoint", "show", str(run)],
    "verify": lambda run, top: ["checkpoint", "verify", str(run)],
    "consolidate": lambda run, top: ["checkpoint", "consolidate", str(run), str(top / "weights.safetensors")],
    "prune": lambda run, top: ["checkpoint", "prune", str(run), "--keep-last", "1"],
}
FILES_OF_CHECKPOINTS = ("manifest.json", "manifest.sha256", "state.json", "config.json")
TENSORS = ("tensors", "tensors/.metadata", "tensors/__0_0.distcp")
IN_CHECKPOINT = tuple(f"checkpoints/step-00000004/{name}" for name in (*FILES_OF_CHECKPOINTS, *TENSORS))
IN_FOLDERS = (
    "tokenizer/fingerprint.json",
    "tokenizer/tokenizer_config.json",
    "transformers/special_ids.json",
    "transformers/generation_config.json",
    "tensorboard/events.out.tfevents.1.1.1",
    "profile/step-00000002",
    "profile/step-00000002/rank-0.json.gz",
    "profile/step-00000002/rank-0.txt",
)
NAMES = (*FILES, "config.step-2.yaml", *FOLDERS, *NESTED, *IN_CHECKPOINT, *IN_FOLDERS)
"""Entries of a run folder in whose place something else is planted; digits stand for any."""


@pytest.mark.long
@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not file], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_no_command_writes_outside_waits_or_ends_in_a_traceback(
    name: str,
    kind: Callable[[Path, Path], None],
    trained: Path,
    tmp_path: Path,
    outside: Path,
    limit_seconds: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command, on a run in which one entry is something else: done, or one sentence and status 1 or 2."""
    shutil.copytree(trained / "data", tmp_path / "data")
    for reader, words in READERS.items():
        top = tmp_path / reader.replace(" ", "-")
        shutil.copytree(trained / "run", top / "run")
        config_file(top, top / "run", data={"folder": str(tmp_path / "data")})
        for old in (top / "run" / name,):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        (top / "run" / name).parent.mkdir(exist_ok=True)
        kind(top / "run" / name, outside)
        before = contents(outside)
        status, lines = command(words(top / "run", top), monkeypatch, capsys)
        assert contents(outside) == before, (reader, status, lines)
        assert status in (0, 1, 2), (reader, status, lines)
        assert not any(word in " ".join(lines) for word in ("Traceback", "Errno")), (reader, lines)
        # A checkpoint that is none is set aside, or bad: status 1 is that of `verify`.
        assert status != 1 or reader in ("verify", "prune"), (reader, lines)


@pytest.mark.parametrize("name", LINKABLE)
def test_a_folder_may_be_elsewhere_where_the_config_says_so(name: str, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside / "folder")
    with pytest.raises(ConfigError, match=rf"{name}: this is a symbolic link.*run.allow_links=\[{name}\]"):
        open_folder(recipe(tmp_path))
    assert open_folder(recipe(tmp_path, run={"allow_links": [name]})) == tmp_path / "run"
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(outside / "new")
    with pytest.raises(ConfigError, match="this is a symbolic link"):
        open_folder(recipe(tmp_path, run={"allow_links": [name]}))


def test_a_run_saves_on_scratch(tmp_path: Path, outside: Path) -> None:
    """The run folder itself is a link that the user typed, and `checkpoints` one that the config allows."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints").symlink_to(outside / "folder")
    shutil.rmtree(outside / "folder" / "step-00000001")
    train = {"steps": 2, "eval_every": 0}
    assert run(recipe(tmp_path, train=train, run={"allow_links": ["checkpoints"]})) == 0
    assert find_newest(outside / "folder").step == 2


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "xb", "a+b"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not file], ids=lambda kind: kind.__name__)
def test_nothing_but_a_file_is_opened(
    kind: Callable[[Path, Path], None], mode: Any, tmp_path: Path, outside: Path, limit_seconds: None
) -> None:
    kind(tmp_path / "entry", outside)
    before = contents(outside)
    with pytest.raises(OSError, match=r"File exists" if mode == "xb" else r"this is .*, not a file"):
        open_run_file(tmp_path / "entry", mode)
    assert contents(outside) == before


def test_a_link_that_is_put_there_since_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question what it is and its opening."""
    monkeypatch.setattr("xscale.core.files.run_files.kind_of", lambda path: "a file")
    for kind in (link_to_file, dangling_link, fifo):
        for mode in ("rb", "wb", "ab", "a+b"):
            path = tmp_path / f"{kind.__name__}-{mode}"
            kind(path, outside)
            before = contents(outside)
            with pytest.raises(OSError):  # noqa: PT011
                open_run_file(path, mode)  # type: ignore[arg-type]
            assert contents(outside) == before


@pytest.mark.parametrize("kind", [link_to_file, dangling_link, fifo, unix_socket], ids=lambda kind: kind.__name__)
def test_an_atomic_write_replaces_what_stands_there(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path, limit_seconds: None
) -> None:
    """The temporary file has a name that can be guessed."""
    kind(tmp_path / f"entry.{os.getpid()}.part", outside)
    kind(tmp_path / "entry", outside)
    before = contents(outside)
    write_atomically(tmp_path / "entry", "mine")
    assert contents(outside) == before
    assert not (tmp_path / "entry").is_symlink()
    assert (tmp_path / "entry").read_text() == "mine"


def test_prune_deletes_nothing_behind_a_link(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path / "mine" / "checkpoints", step)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mine" / "checkpoints")
    before = contents(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"checkpoints: this is a symbolic link.*Give .*checkpoints itself"):
        tools.prune(tmp_path / "run", 1, None, bad_too=True, dry=False)
    assert contents(tmp_path / "mine") == before
    assert tools.prune(tmp_path / "run" / "checkpoints", 1, None, bad_too=False, dry=False)


@pytest.mark.parametrize("name", ["step-00000002", "bad-step-00000002-size", ".step-00000002.replaced"])
def test_a_save_replaces_a_link_in_its_place(name: str, tmp_path: Path, outside: Path) -> None:
    """Dangling too, to which no folder can be renamed."""
    for target in ("folder", "new"):
        folder = tmp_path / target
        folder.mkdir()
        (folder / name).symlink_to(outside / target)
        before = contents(outside)
        save_step(folder, 2)
        assert contents(outside) == before
        assert find_newest(folder, hashes=True).step == 2
        assert not (folder / "step-00000002").is_symlink()


def test_a_damaged_checkpoint_elsewhere_is_set_aside_by_its_link(tmp_path: Path, outside: Path) -> None:
    """No reason is written into the folder that it points to."""
    save_step(tmp_path / "run", 1)
    (tmp_path / "run" / "step-00000002").symlink_to(outside / "folder")
    before = contents(outside)
    assert find_newest(tmp_path / "run", repair=True).step == 1
    assert contents(outside) == before
    assert (tmp_path / "run" / "bad-step-00000002-manifest").is_symlink()


PROMISES = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


def promises(text: str) -> list[str]:
    """Rows of the tables of promises in the documentation."""
    tables = text.split("| promise | test |\n|---|---|\n")[1:]
    return [row for table in tables for row in table.partition("\n\n")[0].splitlines()]


def untested(rows: list[str], tests: str) -> list[str]:
    """Rows that name no test, or one or a case of one that does not exist."""
    named = {row: re.findall(r"`(test_\w+)(?:\[([^`]*)\])?`", row.rpartition(" | ")[2]) for row in rows}

    def exists(name: str, case: str) -> bool:
        return f"def {name}(" in tests and (not case or f'"{case}"' in tests)

    return [row for row, of in named.items() if not of or not all(exists(*test) for test in of)]


def test_each_promise_has_its_test() -> None:
    """The tables in the documentation name tests that exist."""
    rows = promises(PROMISES.read_text(encoding="utf-8"))
    text = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(rows) >= 20
    assert untested(rows, text) == []


def test_a_promise_without_a_test_is_seen() -> None:
    """The control."""
    rows = ["| a | `test_a[b c]` |", "| a | `test_a[d]` |", "| b | `test_b` |", "| c | none |"]
    text = "\n".join(("| promise | test |", "|---|---|", *rows, "", "| d |", ""))
    assert untested(promises(text), 'def test_a(x="b c")') == rows[1:]


def test_folders_are_made_inside(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "link").symlink_to(outside / "folder")
    (tmp_path / "run" / "a" / "gone").symlink_to(outside / "new")
    assert make_run_folder(tmp_path / "run", "a", "b").is_dir()
    for name in ("link", "gone"):
        with pytest.raises(IrregularFileError, match="this is a symbolic link, not a folder"):
            make_run_folder(tmp_path / "run", "a", name, "deeper")
    with pytest.raises(ValueError, match="not the name of a file"):
        make_run_folder(tmp_path / "run", "..")
    assert sorted(path.name for path in outside.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("content", ["yours\n", '{"a": 1}', "x" * 10_000, '{"host": "' + "x" * 10_000])
def test_a_file_of_another_kind_is_no_lock(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    with pytest.raises(IrregularFileError, match="other content, not a lock"):
        FileLock(path).acquire()
    assert path.read_text() == content


@pytest.mark.parametrize(
    "content", ["", "\n", "\0" * 90, '{"ho', '{"host": "a", "pid": 1, "since": "x"}\n', '{"host": "a']
)
def test_a_lock_that_a_kill_or_a_power_cut_left_is_taken(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    with FileLock(path) as lock:
        lock.acquire()
        assert str(os.getpid()) in path.read_text()
