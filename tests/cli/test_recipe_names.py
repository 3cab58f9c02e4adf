"""The name of a recipe stands for its file wherever a command takes a config."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from xscale.cli.main import app, main
from xscale.commands.show.recipes import config_file
from xscale.core.errors import ConfigError
from xscale_launch.command import check_config
from xscale_launch.status import LaunchError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/run/quickstart.yaml"
FILES = {
    "train config": ["train"],
    "plan config": ["plan"],
    "data tokenizer config": ["data", "tokenizer"],
    "data prepare config": ["data", "prepare"],
    "data inspect config": ["data", "inspect"],
    "bench memory config": ["bench", "memory"],
    "bench train config": ["bench", "train"],
    "bench start config": ["bench", "start"],
    "bench checkpoint config": ["bench", "checkpoint", "--config"],
    "checkpoint import config": ["checkpoint", "import", "exported", "runs/new"],
}
"""Parameters that are the recipe's file by the time that the command starts -> the words before the name."""
TEXTS = {
    "explain recipe": (["explain", "optimizer.lr"], "optimizer.lr"),
    "init recipe": (["init"], "quickstart.yaml"),
    "plot pattern pattern": (["plot", "pattern"], "% of the causal blocks"),
    "launch words": (["launch", "local", "--dry-run"], str(QUICKSTART)),
}
"""Parameters that may be something else too -> the words before the name, and what is then said."""
OTHERS = {"init from_"}
"""Configs of other trainers."""
SLOW = {"data stats config"}
"""Typed with a recipe in `test_every_command`, since it prepares the data."""


def parameters(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each parameter of a command and of those below it, by its words."""
    for parameter in command.params:
        yield f"{name} {parameter.name}", parameter
    for below, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{name} {below}".strip())


def takes_config(parameter: Any) -> bool:
    """Whether the help says so; a switch may speak of the config of a run."""
    is_switch = getattr(parameter, "is_flag", False)
    return not is_switch and bool(re.search(r"\b(config|recipe)\b", parameter.help or "", re.IGNORECASE))


def test_every_parameter_that_takes_a_config_is_here() -> None:
    found = {name for name, parameter in parameters(typer.main.get_command(app)) if takes_config(parameter)}
    found = {name for name in found if not name.endswith(("overrides", " out"))}
    assert found == {*FILES, *TEXTS, *OTHERS, *SLOW} - {"launch words"}


@pytest.mark.parametrize(("name", "words"), FILES.items(), ids=FILES)
def test_a_recipe_is_its_file(name: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    *path, parameter = name.split()
    for word in path:
        command = command.commands[word]
    before = words[len(path) :]
    assert command.make_context(path[-1], [*before, "quickstart"]).params[parameter] == QUICKSTART
    with pytest.raises(ConfigError, match="quickstart"):
        command.make_context(path[-1], [*before, "quickstrat"])


@pytest.mark.parametrize(("words", "expected"), TEXTS.values(), ids=TEXTS)
def test_a_recipe_is_understood(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", *words, "quickstart"])
    with pytest.raises(SystemExit):
        main()
    both = capsys.readouterr()
    assert expected in both.out + both.err


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("configs/run/quickstart.yaml", "run"),
        ("configs/xformer/bigbird.yaml", "run"),
        ("configs/compare/experts.yaml", "compare"),
        ("configs/ladder/bytes.yaml", "ladder"),
    ],
)
def test_a_path_of_the_documentation_is_found_without_a_checkout(
    typed: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file(typed, folder) == check_config(typed, []) == ROOT / typed
    (tmp_path / "configs").mkdir()
    with pytest.raises(ConfigError, match="there is no such file"):
        config_file(typed, folder)
    with pytest.raises(LaunchError, match="does not exist"):
        check_config(typed, [])


@pytest.mark.parametrize("typed", ["configs/run/none.yaml", "configs/../README.md", "configs", "configs/run"])
def test_no_other_path_leads_into_the_configs_of_xscale(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        config_file(typed)
    with pytest.raises(LaunchError):
        check_config(typed, [])
