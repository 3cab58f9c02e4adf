"""The workflow that tests every supported version of torch, and the script that chooses one."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = ("constraints.txt", "pyproject.toml", ".ci/use_torch")


def supported(folder: Path = ROOT) -> Requirement:
    """The requirement on torch of the package in `folder`."""
    lines = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (requirement,) = (Requirement(line) for line in lines if line.startswith("torch"))
    return requirement


def pinned(folder: Path = ROOT) -> dict[str, str]:
    lines = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def matrix() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github/workflows/torch.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["continue-on-error"] == "${{ matrix.tried }}"
    assert workflow["permissions"] == {"contents": "read"}
    result: dict[str, Any] = job["strategy"]["matrix"]
    return result


def test_every_supported_version_must_pass_and_newer_ones_are_tried() -> None:
    versions, requirement = matrix(), supported()
    bounds = {item.operator: Version(item.version).minor for item in requirement.specifier}
    assert bounds.keys() == {">=", "<"}
    assert [Version(version).minor for version in versions["torch"]] == list(range(bounds[">="], bounds["<"]))
    assert all(requirement.specifier.contains(version) for version in versions["torch"])
    assert pinned()["torch"] in versions["torch"]
    assert versions["tried"] == [False]
    assert versions["include"]
    for newer in versions["include"]:
        assert newer["tried"] is True
        assert Version(newer["torch"]).minor >= bounds["<"]


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0"])
def test_the_script_makes_a_checkout_install_a_version(version: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([".ci/use_torch", version], cwd=tmp_path, check=True, timeout=60)
    before, after = pinned(), pinned(tmp_path)
    assert after == {name: pin for name, pin in before.items() if name != "triton"} | {"torch": version}
    assert supported(tmp_path).specifier.contains(version)
    changed = supported(tmp_path) != supported()
    assert changed == (version == "2.15.0"), "the upper bound stays for a supported version"
