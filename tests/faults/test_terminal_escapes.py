"""A run folder from anybody whose texts would steer a terminal, forge lines or run in a page: they are shown."""

import errno
import json
import os
import pty
import shutil
import sys
import termios
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.faults.test_hostile import seal
from tests.train.tiny import recipe, run
from xscale.cli.main import main
from xscale.core.compose import dump
from xscale.core.config import encode
from xscale.core.errors import ConfigError, FaultError, NoticeWarning
from xscale.core.say import say, shown

ESCAPE = "\x1b[2J\x1b]0;mine\x07\x9b31m\u202e"
"""Clears a screen, names a window, colours and turns text round."""
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
TEXT = f"{ESCAPE}{SCRIPT}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, and a run whose name, metrics, record, config, state and reasons hold such text."""
    top = tmp_path_factory.mktemp("steers")
    observe = {"tensorboard": False, "report": True}
    train = {"steps": 4, "eval_every": 2, "sample": {"prompts": ["The "], "tokens": 2}}
    assert run(recipe(top, train=train, checkpoint={"every_steps": 2}, observe=observe)) == 0
    folder = top / f"run{ESCAPE}<script>alert(1)<"
    (top / "run").rename(folder)
    (top / "config.yaml").write_text(dump(encode(recipe(top, folder.name, train={**train, "steps": 5}))))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row[f"stack.{TEXT}/load"] = [1.0, 2.0]
        row[TEXT] = 1.0
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    record = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(texts_replaced(record)))
    checkpoint = folder / "checkpoints" / "step-00000004"
    for name in ("state.json", "config.json"):
        content = json.loads((checkpoint / name).read_text())
        (checkpoint / name).write_text(json.dumps({**content, "about": {"title": TEXT, TEXT: TEXT}}))
        seal(checkpoint, name)
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "written_by": TEXT}))
    seal(checkpoint, "config.json")
    (folder / "checkpoints" / "bad-step-00000003-size").mkdir()
    (folder / "checkpoints" / "bad-step-00000003-size" / "reason.txt").write_text(f"{TEXT}\nxscale: done\n")
    (folder / "log.txt").write_text(TEXT)
    return top


def texts_replaced(data: Any, key: str = "") -> Any:
    """The record with every text that is no date, folder or known word replaced."""
    if isinstance(data, dict):
        return {name: texts_replaced(value, name) for name, value in data.items()}
    if isinstance(data, list):
        return [texts_replaced(value, key) for value in data]
    return TEXT if isinstance(data, str) and key in ("text", "prompt", "message", "device", "kernels") else data


def command(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["xscale", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


COMMANDS: dict[str, list[str]] = {
    "ls": ["checkpoint", "ls", "RUN"],
    "show": ["checkpoint", "show", "RUN"],
    "verify": ["checkpoint", "verify", "RUN"],
    "diff": ["checkpoint", "diff", "RUN/checkpoints/step-00000002", "RUN/checkpoints/step-00000004"],
    "prune": ["checkpoint", "prune", "RUN", "--bad", "--dry-run"],
    "consolidate": ["checkpoint", "consolidate", "RUN", "TOP/out.safetensors"],
    "export": ["checkpoint", "export", "RUN", "TOP/universal", "--to", "deepspeed-universal"],
    "report": ["report", "RUN"],
    "a report of two": ["report", "RUN", "RUN", "--output", "TOP/two.html"],
    "eval": ["eval", "RUN", "--sequences", "2"],
    "generate": ["generate", "RUN", "a", "--tokens", "2"],
    "train": ["train", "TOP/config.yaml"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_lets_a_run_folder_steer_a_terminal(
    name: str, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    top = tmp_path / "top"
    shutil.copytree(hostile, top)
    (folder,) = (path for path in top.iterdir() if path.name.startswith("run"))
    config = (top / "config.yaml").read_text()
    (top / "config.yaml").write_text(config.replace(str(hostile), str(top)))
    words = [word.replace("RUN", str(folder)).replace("TOP", str(top)) for word in COMMANDS[name]]
    status, said = command(words, monkeypatch, capsys)
    assert status in (0, 1, 2), said
    assert "Traceback" not in said
    assert [letter for letter in said if letter not in "\n\t" and not letter.isprintable()] == []
    assert "\nxscale: done" not in said
    pages = [*top.glob("*.html"), *folder.glob("*.html")]
    assert pages
    for page in pages:
        content = page.read_text()
        assert "<script>alert" not in content
        assert "<img src=x" not in content
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(content)


@contextmanager
def read_terminal() -> Iterator[Callable[[], str]]:
    """A terminal as standard output, and what it has received."""
    host, terminal = pty.openpty()
    settings = termios.tcgetattr(terminal)
    # Bytes as they are written: no return before each newline.
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    try:
        with open(terminal, "w", encoding="utf-8") as stream, mock.patch.object(sys, "stdout", stream):
            yield lambda: os.read(host, 1 << 16).decode()
    finally:
        os.close(host)


def test_a_generated_text_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal it is shown; a file or a program gets it as it is."""
    monkeypatch.setattr("xscale.generate.generate_text.generate_text", lambda *_, **__: f"one {ESCAPE}\n\t\rtwo é 😀")
    words = ["generate", str(tmp_path), "a"]
    with read_terminal() as received:
        assert sys.stdout.isatty()
        status, _ = command(words, monkeypatch, capsys)
        assert status == 0
        assert received() == f"one {shown(ESCAPE)}\n\t\\rtwo é 😀\n"
    assert command(words, monkeypatch, capsys) == (0, f"one {ESCAPE}\n\t\rtwo é 😀\n")


def refuse() -> None:
    raise ConfigError(f"key{ESCAPE}", f"the value {ESCAPE} is wrong", f"Give another than {ESCAPE}.")


def fail() -> None:
    raise FaultError(f"/folder{ESCAPE}: damaged")


def meet_a_full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", f"/folder{ESCAPE}")


def warn() -> None:
    warnings.warn(NoticeWarning(f"the key {ESCAPE} is new"), stacklevel=1)
    raise FaultError("ended")


@pytest.mark.parametrize("act", [refuse, fail, meet_a_full_disk, warn], ids=lambda act: act.__name__)
def test_no_error_or_warning_steers_a_terminal(
    act: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["xscale"])
    with pytest.raises(SystemExit):
        main(act)
    said = capsys.readouterr().err
    assert shown(ESCAPE) in said
    assert shown(said) == said


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain\ttext\nand more", "plain\ttext\nand more"),
        ("\x1b[2J\r\x07", "\\x1b[2J\\r\\x07"),
        ("\u3000中文\xa0é 😀", "\u3000中文\xa0é 😀"),
        ("a\u202eb\ud800\x9b", "a\\u202eb\\ud800\\x9b"),
    ],
)
def test_text_is_shown(text: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(text) == wanted
    say(text)
    assert capsys.readouterr().out == f"{wanted}\n"
