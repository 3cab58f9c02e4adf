"""Profiles of clusters: found, read, and refused with the key's name."""

from pathlib import Path

import pytest

from xscale_launch import profile
from xscale_launch.status import LaunchError

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
        ("[a]\npartiton = 'x'", "a.partiton is not a setting of a cluster; did you mean partition"),
        ("[a]\nnodes = '2'", "a.nodes must be an integer, got '2'"),
        ("[a]\nnodes = true", "a.nodes must be an integer"),
        ("[a]\nexclude = 'n1'", "a.exclude must be a list of strings"),
        ("[a]\nstart = 'mpirun'", "it can be node, task, torchrun"),
        ("[a.container]\nkind = 'docker'", "it can be apptainer, pyxis"),
        ("[a]\nenvironment = 'X=1'", "must be a table"),
        ("a = 3", "must be a table of settings"),
        ("[a", "is not valid TOML"),
        ("[b]", "has no cluster 'a'; it has b"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said.replace("(", r"\(")):
        profile.load(written(tmp_path, text), "a")


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    assert profile.find_file(None, home, here) is None
    for path in (home / ".config/xscale", here / "configs", here):
        path.mkdir(parents=True, exist_ok=True)
        (path / "clusters.toml").touch()
        assert profile.find_file(None, home, here) == path / "clusters.toml"
    with pytest.raises(LaunchError, match="does not exist"):
        profile.find_file(Path("nowhere.toml"), home, here)
    (here / "clusters.yaml").touch()
    with pytest.raises(LaunchError, match=r"has clusters\.toml and clusters\.yaml: keep one"):
        profile.find_file(None, home, here)
    (here / "clusters.toml").unlink()
    assert profile.find_file(None, home, here) == here / "clusters.yaml"
    with pytest.raises(LaunchError, match=r"no clusters\.toml was found for --cluster juno"):
        profile.load(None, "juno")


def test_yaml_says_the_same(tmp_path: Path) -> None:
    import dataclasses

    def plain(value: object) -> object:
        return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]

    import tomllib

    import yaml

    path = tmp_path / "clusters.yaml"
    path.write_text(yaml.safe_dump(tomllib.loads(EXAMPLE.read_text())))
    for name in ("gpu", "gpu-container", None):
        assert plain(profile.load(path, name)) == plain(profile.load(EXAMPLE, name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {nodes: many}", "a.nodes must be an integer, got 'many'"),
        ("a: {exclusive: maybe}", "a.exclusive must be true or false"),
        ("a: {partiton: x}", "did you mean partition"),
        ("a: [", "is not valid YAML"),
        ("- a", "must be a table of clusters by name"),
    ],
)
def test_mistakes_in_yaml_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text(text)
    with pytest.raises(LaunchError, match=said):
        profile.load(path, "a")


def test_a_time_limit_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "clusters.yaml"
    path.write_text("default: a\na: {time: 12:00:00, partition: on, nodes: 2, gpu_memory_gigabytes: 80}\n")
    found = profile.load(path, None)
    assert (found.time, found.partition, found.nodes, found.gpu_memory_gigabytes) == ("12:00:00", "on", 2, 80.0)


def test_without_pyyaml_toml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "clusters.yaml"
    path.write_text("a: {}")
    with pytest.raises(LaunchError, match=r"convert the file to clusters\.toml"):
        profile.load(path, "a")
