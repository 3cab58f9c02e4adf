"""Paths in configs: `~` and `$VARIABLE`, and which keys are paths."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import pydantic
import pytest

from xscale.core.config import Config, decode
from xscale.core.errors import ConfigError
from xscale.core.paths import expand_path
from xscale.recipe import Recipe

PLACES = {
    "run.dir": lambda path: {"run": {"dir": path}},
    "data.folder": lambda path: {"data": {"folder": path}},
    "data.prepared": lambda path: {"data": {"prepared": path}},
    "data.blend.0.prepared": lambda path: {"data": {"blend": [{"prepared": path}]}},
    "data.source.paths.0": lambda path: {"data": {"source": {"kind": "jsonl", "paths": [path]}}},
    "data.tokenizer.file": lambda path: {"data": {"tokenizer": {"kind": "huggingface", "file": path}}},
    "init.from": lambda path: {"init": {"from": path}},
    "checkpoint.memory_folder": lambda path: {"checkpoint": {"memory_folder": path}},
    "parallel.zero.offload.folder": lambda path: {"parallel": {"zero": {"offload": {"folder": path}}}},
    "train.tasks.folder": lambda path: {"train": {"tasks": {"folder": path}}},
}


def value_of(recipe: Any, key: str) -> Any:
    for name in key.replace("init.from", "init.from_").split("."):
        recipe = recipe[int(name)] if name.isdigit() else getattr(recipe, name)
    return recipe


@pytest.mark.parametrize("key", PLACES)
def test_each_key_expands(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOWHERE", raising=False)
    for written, path in {
        "~/runs/a": "/home/me/runs/a",
        "$SCRATCH/a": "/scratch/a",
        "${SCRATCH}/a": "/scratch/a",
        "$HOME/x": "/home/me/x",
        "a/~/b": "a/~/b",
        "~": "/home/me",
        "a$": "a$",
    }.items():
        assert value_of(decode(Recipe, PLACES[key](written)), key) == path
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*the variable \$NOWHERE of the environment is not set"):
        decode(Recipe, PLACES[key]("$NOWHERE/a"))
    with pytest.raises(ConfigError, match=r"~nobody-here is no user .* write \./~nobody-here/a"):
        decode(Recipe, PLACES[key]("~nobody-here/a"))


def test_a_folder_that_is_called_so_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~nobody-here").mkdir()
    assert expand_path("~nobody-here") == "~nobody-here"
    assert expand_path("./~nobody-here/a") == "./~nobody-here/a"


NAMES = re.compile(r"^(dir|paths|.*folder|.*file|prepared|from_|teacher|dataset)$")


def text_fields(kind: type[Config]) -> dict[str, pydantic.fields.FieldInfo]:
    """The fields of a config that hold text."""

    def is_text(annotation: Any) -> bool:
        if typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple, typing.Annotated):
            return any(map(is_text, typing.get_args(annotation)))
        return annotation is str

    return {name: field for name, field in kind.model_fields.items() if is_text(field.annotation)}


def configs(kind: type[Config] = Config) -> set[type[Config]]:
    return {kind}.union(*(configs(part) for part in kind.__subclasses__()))


def test_every_key_of_a_file_or_folder_is_a_path() -> None:
    plain = [
        f"{kind.__module__}.{name}"
        for kind in configs()
        if kind.__module__.startswith("xscale.")
        for name, field in text_fields(kind).items()
        if NAMES.match(name) and "expand_path" not in f"{field.annotation!r} {field.metadata!r}"
    ]
    assert not plain, f"these are not PathText: {plain}"
