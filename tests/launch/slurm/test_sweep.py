"""Sweeps: the runs that `--sweep` makes, and those that a file of `--members` lists."""

import json
import re
from pathlib import Path

import pytest

from xscale_launch.slurm.sweep import SweepMember, members, read_members
from xscale_launch.status import LaunchError


def test_every_combination_in_order() -> None:
    found = members(["optim.lr=1e-4,3e-4", "run.seed=1,2"])
    assert [member.overrides for member in found] == [
        ("optim.lr=1e-4", "run.seed=1"),
        ("optim.lr=1e-4", "run.seed=2"),
        ("optim.lr=3e-4", "run.seed=1"),
        ("optim.lr=3e-4", "run.seed=2"),
    ]
    assert found[0].name == "optim.lr=1e-4,run.seed=1"


def test_commas_inside_brackets_belong_to_the_value() -> None:
    assert [member.overrides[0] for member in members(["a.b=[1,2],[3,4]"])] == ["a.b=[1,2]", "a.b=[3,4]"]


def test_names_are_file_names_and_differ() -> None:
    names = [member.name for member in members(["use=model/a,model a"])]
    assert len(set(names)) == 2
    assert all("/" not in name and " " not in name for name in names)


@pytest.mark.parametrize("text", ["optim.lr", "optim.lr=", "=1,2", "a=1,,2", "a=1,1"])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--sweep"):
        members([text])


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(LaunchError, match="a key twice"):
        members(["a=1,2", "a=3"])


def write(folder: Path, data: object) -> Path:
    file = folder / "members.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_members_of_a_file_keep_their_names_and_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, {"w16-seed-0": ["model.width=16", "run.seed=0"], "w32": ["model.width=32"]})
    assert read_members(file) == [
        SweepMember("w16-seed-0", ("model.width=16", "run.seed=0")),
        SweepMember("w32", ("model.width=32",)),
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("{", "it is not JSON"),
        ({}, "with at least one run"),
        ([["a=1"]], 'write {"name"'),
        ({"a": "b=1"}, 'write {"name"'),
        ({"a": ["b"]}, 'write {"name"'),
        ({"../a": ["b=1"]}, "'../a' is no name of a folder"),
        ({"..": ["b=1"]}, "'..' is no name of a folder"),
    ],
)
def test_what_is_no_list_of_members_is_refused(data: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=re.escape(text)):
        read_members(write(tmp_path, data))


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        read_members(tmp_path / "none.json")
