"""Every path argument of every command, the launcher's too, has one type, by which `~` and `$VARIABLE` are expanded."""

import argparse
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from xscale.cli.main import app
from xscale.core.errors import ConfigError
from xscale.core.paths import expand_path, path, path_or_pattern
from xscale_launch import doctor
from xscale_launch.main import verbs
from xscale_launch.paths import expand, path_argument
from xscale_launch.status import LaunchError

NO_PATHS = {
    *("plan device", "list name", "list kind", "explain key", "ladder slurm", "generate text", "generate prompt"),
    *("generate suffix", "eval thresholds", "eval tasks", "bench attention only", "bench attention lengths"),
    *("bench attention device", "bench attention dtype", "bench layers only", "bench layers lengths"),
    *("bench layers device", "bench layers dtype", "bench decode only", "bench decode device", "bench decode dtype"),
    *(
        "bench checkpoint device",
        "bench train side",
        "bench parallel only",
        "bench gpu only",
        "bench gpu device",
        "bench plan device",
    ),
    *("bench links name", "checkpoint show only", "checkpoint diff only", "checkpoint consolidate only"),
    *("checkpoint export to", "checkpoint export architecture", "checkpoint import origin", "check-part names"),
    # The launcher parses its words itself.
    *("launch words", "doctor words"),
}
"""Texts on the command line that are no paths, by command and parameter."""
NO_PATHS_OF_LAUNCHER = {
    *("slurm cluster", "slurm exclude", "slurm name", "slurm after", "slurm sweep", "mpi hosts", "mpi cluster"),
    *("logs member", "resume after"),
    # Tests give the trainer's command; a choice of words.
    *("local xscale", "slurm xscale", "mpi xscale", "mpi work"),
    # `check_config` expands it, unless it is the name of a recipe.
    *("local config", "slurm config", "mpi config"),
}


def commands(group: typer.Typer, name: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name or command.callback.__name__}".strip(), command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{name} {inner.name}".strip())


def parameters() -> Iterator[tuple[str, Any, Any]]:
    """Each parameter of a command: its name, its type, and what typer is told of it."""
    for name, function in commands(app):
        hints = typing.get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters:
            hint = hints[parameter]
            kind, *told = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
            yield f"{name} {parameter}", kind, told[0] if told else None


def test_every_path_of_a_command_is_expanded() -> None:
    texts, paths = set(), set()
    for name, kind, told in parameters():
        if "Path" in str(kind):
            paths.add(name)
            assert told.parser is path, name
        elif "str" in str(kind) and not name.endswith("overrides") and told.parser is not path_or_pattern:
            texts.add(name)
    assert texts == NO_PATHS
    assert len(paths) > 40


def actions() -> Iterator[tuple[str, argparse.Action]]:
    for name, verb in verbs().items():
        parser = argparse.ArgumentParser()
        verb.add_arguments(parser)
        yield from ((f"{name} {action.dest}", action) for action in parser._actions)
    yield from ((f"doctor {action.dest}", action) for action in doctor.argument_parser()._actions)


def test_every_path_of_the_launcher_is_expanded() -> None:
    texts = {name for name, action in actions() if action.type is None and action.nargs != 0}
    texts = {name for name in texts if not name.endswith("overrides")}
    assert not [name for name, action in actions() if action.type is Path]
    assert texts == NO_PATHS_OF_LAUNCHER
    assert sum(action.type is path_argument for _, action in actions()) > 10


CASES = {
    "~/runs/a": "/home/me/runs/a",
    "~": "/home/me",
    "$SCRATCH/a": "/scratch/a",
    "${SCRATCH}/a": "/scratch/a",
    "a/~/b": "a/~/b",
    "./~": "~",
    "a$": "a$",
    "quickstart": "quickstart",
}
REFUSED = {
    "$NOWHERE/a": r"the variable \$NOWHERE of the environment is not set",
    "~nobody-here/a": r"~nobody-here is no user .* write \./~nobody-here/a",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOWHERE", raising=False)


@pytest.mark.parametrize("written", CASES)
def test_commands_configs_and_the_launcher_have_one_rule(written: str) -> None:
    expected = Path(CASES[written])
    assert path(written) == Path(expand_path(written)) == expand(written) == path_argument(written) == expected
    assert Path(path_or_pattern(written)) == expected


@pytest.mark.parametrize("written", REFUSED)
def test_what_is_not_there_is_refused(written: str) -> None:
    for read in (path, path_or_pattern):
        with pytest.raises(ConfigError, match=REFUSED[written]):
            read(written)
    with pytest.raises(LaunchError, match=REFUSED[written]):
        expand(written)
    with pytest.raises(argparse.ArgumentTypeError, match=REFUSED[written]):
        path_argument(written)


COMMANDS: dict[str, list[str]] = {
    "an option": ["report", "a", "--output=$NOWHERE/x"],
    "an argument of several": ["report", "$NOWHERE/x"],
    "a config": ["train", "$NOWHERE/x.yaml"],
    "a key": ["train", "quickstart", "run.dir=$NOWHERE/x"],
    "the launcher's config": ["launch", "local", "$NOWHERE/x.yaml"],
    "the launcher's run": ["launch", "status", "$NOWHERE/x"],
    "the launcher's key": ["launch", "local", "quickstart", "run.dir=$NOWHERE/x"],
    "the doctor's folder": ["doctor", "--folder=$NOWHERE/x"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_it_with_a_sentence(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xscale", *COMMANDS[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "$NOWHERE of the environment is not set" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
