"""The images stay in step with the pins, the workflow with .ci/run, and both are written as they should be."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ORDER = ("FROM", "RUN", "WORKDIR", "ARG", "ENV", "COPY", "CMD")


def instructions(text: str) -> list[str]:
    """The instructions of a Dockerfile, comments gone and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()


def faults(text: str) -> list[str]:
    """Faults that a review would find."""
    found = []
    steps = instructions(text)
    for step in steps:
        word, _, rest = step.partition(" ")
        if word not in ORDER:
            found.append(f"{word} is not used here: {step}")
        if word == "FROM" and (":" not in rest or rest.endswith(":latest")):
            found.append(f"a base without a version: {step}")
        if "apt-get install" in rest and ("--no-install-recommends" not in rest or "/var/lib/apt/lists" not in rest):
            found.append(f"leaves packages or lists behind: {step}")
        if "apt-get install" in rest and "apt-get update" not in rest:
            found.append(f"installs from an old list: {step}")
        if "pip install" in rest:
            for call in re.split(r"&&", rest):
                free = "pip install" in call and "constraints.txt" not in call and "--no-deps" not in call
                if free and not re.search(r"\"(torch==\$|setuptools)", call):
                    found.append(f"installs without the constraints: {call.strip()}")
        if re.search(r"\b(curl|wget)\b.*\|\s*(ba)?sh", rest):
            found.append(f"runs what it has downloaded: {step}")
        if re.search(r"==\d", rest):
            found.append(f"a version that belongs into constraints.txt: {step}")
    if not steps[-1].startswith("CMD ["):
        found.append("does not end with a command as a list")
    return found


def checker() -> ModuleType:
    """docker/check_imports.py as a module."""
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "docker/check_imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_two_images() -> None:
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_are_clean(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "bad",
    [
        "FROM debian\nCMD [\"x\"]",
        "FROM debian:latest\nCMD [\"x\"]",
        "FROM debian:12\nRUN apt-get update && apt-get install -y git\nCMD [\"x\"]",
        "FROM debian:12\nRUN pip install deepspeed\nCMD [\"x\"]",
        "FROM debian:12\nRUN pip install -c constraints.txt torch==2.1\nCMD [\"x\"]",
        "FROM debian:12\nADD http://x /x\nCMD [\"x\"]",
        "FROM debian:12\nCMD x",
    ],
)  # fmt: skip
def test_the_check_can_fail(bad: str) -> None:
    assert faults(bad)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = {line.strip("/*") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for path in FILES:
        for step in instructions(path.read_text()):
            if step.startswith("COPY "):
                for source in step.split()[1:-1]:
                    assert (ROOT / source).exists(), f"{path.name}: {source}"
                    assert source.split("/")[0] not in ignored


def test_extras_exist_and_the_whole_stack_is_in_the_cuda_image() -> None:
    text = (ROOT / "docker/cuda.Dockerfile").read_text()
    (extras,) = re.findall(r"-e \"\.\[([\w,]+)\]\"", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert {"deepspeed", "megatron", "mpi"} <= set(extras.split(","))
    assert re.search(r"APEX_COMMIT=[0-9a-f]{40}\n", text)
    assert {"APEX_CPP_EXT=1", "APEX_CUDA_EXT=1"} <= set(re.findall(r"APEX_\w+=1", text))
    assert "openmpi-bin" in text
    (torch,) = re.findall(r"# torch (\d+\.\d+)'s wheels are built with CUDA (\d+\.\d+)", text)
    assert checker().pins()["torch"].startswith(torch[0] + "."), "the comment speaks of another torch than is pinned"
    assert f"nvidia/cuda:{torch[1]}." in text


def test_pins_satisfy_the_project() -> None:
    from packaging.requirements import Requirement

    pins = checker().pins()
    extras = [line for name in ("deepspeed", "megatron", "mpi", "hf", "dev") for line in
              PROJECT["optional-dependencies"].get(name, [])]  # fmt: skip
    for line in [*PROJECT["dependencies"], *extras]:
        wanted = Requirement(line)
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in pins, f"{name} is in pyproject.toml and not in constraints.txt"
        assert wanted.specifier.contains(pins[name]), f"{name} {pins[name]} is outside {wanted.specifier}"


def test_the_import_check_knows_every_base_dependency() -> None:
    names = {re.split(r"[<>=;\[ ]", line)[0].lower() for line in PROJECT["dependencies"]}
    checked = {name.partition(".")[0] for name in checker().MODULES["base"]} | {"pyyaml", "pillow"}
    assert names <= checked


def test_every_extra_of_an_image_is_imported() -> None:
    modules = checker().MODULES
    folded = {"cpu": ["deepspeed", "megatron", "mpi", "hf", "dev"]}
    for path in FILES:
        text = path.read_text()
        (groups,) = re.findall(r"check_imports\.py ([\w ]+)$", text, re.MULTILINE)
        (extras,) = re.findall(r"-e \"\.\[([\w,]+)\]\"", text) or [",".join(folded[path.stem])]
        assert {"base", *extras.split(",")} <= set(groups.split()) <= set(modules), path.name


def test_the_extra_dev_is_imported() -> None:
    """Requirements that the extra names itself, and through the groups of other extras."""
    modules = {name.partition(".")[0] for group in checker().MODULES.values() for name in group}
    names = [re.split(r"[<>=;\[ ]", line)[0].replace("-", "_") for line in PROJECT["optional-dependencies"]["dev"]]
    imported = {name.removeprefix("pytest_") for name in names if not name.startswith("types_")}
    assert imported - {"megatron_core", "mkdocs_material", "fla_core", "scikit_learn"} <= modules


def test_the_import_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module = checker()
    assert module.main([]) == 2
    monkeypatch.setitem(module.MODULES, "mpi", ["no_such_module_here"])
    monkeypatch.setattr(module, "pins", lambda: {"numpy": "0.0.1"})
    found = module.problems(["mpi"])
    assert len(found) == 2
    assert "no_such_module_here" in found[0]
    assert "0.0.1 is pinned" in found[1]
    assert module.main(["mpi"]) == 1


def test_the_cpu_image_runs_the_tests() -> None:
    assert instructions((ROOT / "docker/cpu.Dockerfile").read_text())[-1] == 'CMD ["make", "test"]'


def test_the_workflow_runs_what_a_person_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert (ROOT / ".ci/run").is_file()
    assert job["timeout-minutes"] <= 90
    assert workflow["permissions"] == {"contents": "read"}
    assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)
