"""Profiles of clusters: found, read, and refused with the key's name."""

from pathlib import Path

import pytest

from xscale_launch import profile
from xscale_launch.errors import LaunchError

EXAMPLE = Path(__file__).parents[2] / "configs/clusters.example.toml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "clusters.toml"
    path.write_text(text)
    return path


def test_the_example_shows_every_key() -> None:
    import dataclasses
    import tomllib

    content = tomllib.loads(EXAMPLE.read_text())
    content.pop("default")
    shown = {key for table in content.values() for key in table}
    assert shown == {field.name for field in dataclasses.fields(profile.Profile)}
    inside = {key for table in content.values() for key in table.get("container", {})}
    assert inside == {field.name for field in dataclasses.fields(profile.Container)}
    for name in content:
        profile.load(EXAMPLE, name)


def test_the_default_profile_and_a_named_one(tmp_path: Path) -> None:
    path = written(tmp_path, 'default = "a"\n[a]\nnodes = 2\n[b]\npartition = "x"\nminimum_disk_gigabytes = 5\n')
    assert profile.load(path, None).nodes == 2
    assert profile.load(path, "b").partition == "x"
    assert profile.load(path, "b").minimum_disk_gigabytes == 5.0
    assert profile.load(None, None) == profile.Profile()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\npartiton = 'x'", "a.partiton is no setting of a cluster; did you mean partition"),
        ("[a]\nnodes = '2'", "a.nodes should be a whole number, and is '2'"),
        ("[a]\nnodes = true", "a.nodes should be a whole number"),
        ("[a]\nexclude = 'n1'", "a.exclude should be a list of strings"),
        ("[a]\nstart = 'mpirun'", "it can be node, task, torchrun"),
        ("[a.container]\nkind = 'docker'", "it can be apptainer, pyxis"),
        ("[a]\nenvironment = 'X=1'", "should be a table"),
        ("a = 3", "should be a table of settings"),
        ("[a", "is no TOML"),
        ("[b]", "has no cluster 'a'; it has b"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said.replace("(", r"\(")):
        profile.load(written(tmp_path, text), "a")


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    assert profile.find(None, home, here) is None
    for path in (home / ".config/xscale", here / "configs", here):
        path.mkdir(parents=True, exist_ok=True)
        (path / "clusters.toml").touch()
        assert profile.find(None, home, here) == path / "clusters.toml"
    with pytest.raises(LaunchError, match="there is no file"):
        profile.find("nowhere.toml", home, here)
    with pytest.raises(LaunchError, match="in TOML"):
        profile.find("clusters.yaml", home, here)
    with pytest.raises(LaunchError, match=r"no clusters\.toml that could hold 'juno'"):
        profile.load(None, "juno")
