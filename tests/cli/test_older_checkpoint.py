"""The newest checkpoint is damaged: a command that reads says which step it takes instead, or refuses when told to."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny import recipe, run
from xscale.cli.main import main
from xscale.core.compose import dump
from xscale.core.config import encode

MIXTURE = "model.stack.block.ffn={kind: moe, experts: 2, expert: {kind: gated, hidden: 16}}"
COMMANDS = {
    "eval": ["eval", "RUN", "--sequences", "2"],
    "eval with a sliding window": ["eval", "RUN", "--sequences", "2", "--window", "16"],
    "generate": ["generate", "RUN", "--tokens", "2"],
    "checkpoint show": ["checkpoint", "show", "RUN"],
    "checkpoint show --json": ["checkpoint", "show", "RUN", "--json"],
    "checkpoint consolidate": ["checkpoint", "consolidate", "RUN", "OUT"],
    "checkpoint export": ["checkpoint", "export", "RUN", "OUT", "--to", "deepspeed-universal"],
    "checkpoint upcycle": ["checkpoint", "upcycle", "DENSE", "OUT", MIXTURE],
    "checkpoint merge-lora": ["checkpoint", "merge-lora", "LORA", "OUT"],
}
DENSE = {
    "kind": "decoder",
    "width": 16,
    "stack": {
        "depth": 1,
        "block": {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "gated", "hidden": 16}},
    },
}
READ_BY_RUNS = {"initial weights": ("init", "from"), "a teacher": ("distill", "teacher")}
"""Keys of a run's config that name another run, whose newest checkpoint it reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    others: dict[str, Any] = {"run": {}, "dense": {"model": DENSE}, "lora": {"model": DENSE, "lora": {"rank": 2}}}
    for name, sections in others.items():
        settings = recipe(folder, name, train={"steps": 4}, checkpoint={"every_steps": 2}, **sections)
        assert run(settings) == 0
        (folder / name / "checkpoints" / "step-00000004" / "state.json").unlink()
    return folder / "run"


@pytest.fixture(params=COMMANDS)
def words(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> list[str]:
    places = {name.upper(): str(folder.parent / name) for name in ("run", "dense", "lora")}
    places["OUT"] = str(tmp_path / "out")
    return [places.get(word, word) for word in COMMANDS[request.param]]


def call(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(status, standard output, stderr) of the program, within this process."""
    monkeypatch.setattr(sys, "argv", ["xscale", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_an_older_step_is_said_in_a_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(words, monkeypatch, capsys)
    assert status == 0, err
    lines = [line for line in err.splitlines() if "warning" in line]
    assert len(lines) == 1, err
    assert "step-00000004: the file state.json is missing" in lines[0]
    assert lines[0].endswith("step 2 is read instead")
    assert "step 2" in out + err.replace(lines[0], "") or json.loads(out).get("step", 2) == 2


def test_strict_refuses(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = call([*words, "--strict"], monkeypatch, capsys)
    assert (status, out) == (2, "")
    assert "the newest checkpoint is damaged" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("step", "what"), [("4", "the checkpoint of step 4 is damaged"), ("3", "no checkpoint of step 3")]
)
def test_a_step_that_cannot_be_read_is_refused(
    step: str, what: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call([*words, "--step", step], monkeypatch, capsys)
    assert (status, out) == (2, "")
    assert what in err


def test_a_step_that_is_asked_for_is_no_warning(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call([*words, "--step", "2"], monkeypatch, capsys)
    assert status == 0, err
    assert "warning" not in err
    assert "2" in out + err


@pytest.mark.long
@pytest.mark.parametrize("what", READ_BY_RUNS)
def test_a_run_that_reads_another_says_which_step(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section, key = READ_BY_RUNS[what]
    data = {"folder": str(folder.parent / "data")}
    settings = recipe(tmp_path, data=data, train={"steps": 1, "eval_every": 0}, **{section: {key: str(folder)}})
    (tmp_path / "config.yaml").write_text(dump(encode(settings)))
    status, out, err = call(["train", str(tmp_path / "config.yaml")], monkeypatch, capsys)
    assert status == 0, err
    lines = [line for line in err.splitlines() if "warning" in line]
    assert len(lines) == 1, err
    assert "step-00000004: the file state.json is missing" in lines[0]
    assert lines[0].endswith("step 2 is read instead")
    assert "checkpoints/step-00000002" in (tmp_path / "run" / "log.txt").read_text() + out
