"""Every command typed with nothing, a recipe, a finished and an unfinished run: a result or a sentence.

The status is 0, 1, 2 or 3, and neither stream has a traceback or an object's address.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from xscale.cli.main import app
from xscale_launch.main import verbs

ROOT = Path(__file__).parents[2]
SLOW = {"bench", "doctor"}
"""Commands that do their work with nothing, which takes its time."""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The command and those below it, by their words."""
    yield name
    for below, inner in getattr(command, "commands", {}).items():
        if below not in SLOW:
            yield from commands(inner, f"{name} {below}".strip())


COMMANDS = [*commands(typer.main.get_command(app)), *(f"launch {verb}" for verb in verbs())]


SMALL = [
    "train.batch_size=2",
    "train.micro_batch_size=1",
    "train.eval_every=0",
    "train.baseline=false",
    "data.sequence_length=64",
    "data.workers=1",
    f"data.source={{kind: text, paths: [{ROOT / 'xscale/core/*.py'}]}}",
]
"""Overrides that make a run of `bytes` take seconds."""
WITH_OVERRIDES = {
    *("train", "plan", "data tokenizer", "data prepare", "data inspect", "data stats", "launch local"),
    *("launch slurm", "launch mpi"),
}
"""Commands that take a config and overrides."""
MORE = {
    "checkpoint export": ["exported"],
    "checkpoint merge-lora": ["new"],
    "checkpoint upcycle": ["new"],
    "checkpoint consolidate": ["weights.safetensors"],
    "checkpoint import": ["new", "bytes"],
    "checkpoint prune": ["--keep-last", "1"],
    "launch mpi": ["--processes", "1"],
    "generate": ["def ", "--tokens", "2"],
}
"""Words behind the recipe or the run, so that the command has what it needs."""


def type_command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    return subprocess.run(
        [sys.executable, "-m", "xscale", *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


NOISE = re.compile(
    r"^[WIE]\d{4} |^\[[WIE]\d{4} |^\[Gloo\]|^\[\d{4}-\d\d-\d\d [\d:,]+\] \[\w+\]|^WARNING:|Failed to load|"
    r"(?:User|Future|Deprecation|Runtime|Resource|Syntax)Warning|site-packages|\d%\|"
)
"""Lines that a library prints: of its logger, a warning, a bar of progress."""


def noise_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if NOISE.search(line)]


def assert_result_or_sentence(done: subprocess.CompletedProcess[str]) -> None:
    both = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2, 3), both
    assert both.strip(), "nothing is said"
    assert noise_in(done.stderr) == []
    # The whole line, since a document that is shown may have the word.
    assert "Traceback (most recent call last):" not in both, both
    assert not re.search(r"<\S+ object at 0x[0-9a-f]+>", both), both
    if done.returncode:
        assert re.search(r"xscale|Usage|usage", done.stderr or done.stdout), both


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_nothing_is_a_result_or_a_sentence(command: str, tmp_path: Path) -> None:
    assert_result_or_sentence(type_command(command.split(), tmp_path))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and one that was stopped on its way, of the same prepared data."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more, status in (("finished", [], 0), ("unfinished", ["train.stop_after=2"], 75)):
        words = ["train", "bytes", *SMALL, "train.steps=4", f"run.dir={name}", f"data.folder={folder / 'data'}", *more]
        done = type_command(words, folder)
        assert done.returncode == status, done.stderr
    return folder


def with_recipe(command: str, folder: Path) -> list[str]:
    """The words of a command with a recipe that takes seconds."""
    # A ladder of the name `bytes` would be trained.
    words = [*command.split(), "small" if command == "ladder" else "bytes", *MORE.get(command, [])]
    return words + [*SMALL, "train.steps=2", f"data.folder={folder / 'data'}"] * (command in WITH_OVERRIDES)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", [command for command in COMMANDS if command])
def test_a_command_with_a_recipe_is_a_result_or_a_sentence(command: str, runs: Path, tmp_path: Path) -> None:
    assert_result_or_sentence(type_command(with_recipe(command, runs), tmp_path))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", ["finished", "unfinished"])
@pytest.mark.parametrize("command", [command for command in COMMANDS if command])
def test_a_command_with_a_run_is_a_result_or_a_sentence(command: str, run: str, runs: Path, tmp_path: Path) -> None:
    # A copy, since some commands change the run.
    shutil.copytree(runs / run, tmp_path / run)
    assert_result_or_sentence(type_command([*command.split(), run, *MORE.get(command, [])], tmp_path))


def test_the_commands_are_found() -> None:
    """Negative control."""
    assert {"train", "check-part", "data prepare", "checkpoint verify", "launch slurm"} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, ""),
        (75, "xscale: stopped"),
        (1, "Traceback (most recent call last):\nxscale"),
        (0, "<xscale.run.Run object at 0x7f00>"),
        (2, "KeyError: 3"),
    ],
)
def test_what_is_no_answer_is_seen(status: int, said: str) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        assert_result_or_sentence(subprocess.CompletedProcess([], status, "", said))
