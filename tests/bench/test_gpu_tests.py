"""The tests of a GPU's job: they are all in it, they collect where packages are missing, and their machinery runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.parts_on_device import PartOnDevice, build, relative_difference, subjects
from tests.gpu.test_models import check
from xscale.bench.gpu.case import GpuContext
from xscale.bench.gpu.cases.correct import FILES, cases, outcome_of

ROOT = Path(__file__).parents[2]
MISSING = ("pyarrow", "datasets", "schedulefree", "deepspeed", "megatron", "apex", "lm_eval", "sacrebleu", "mlflow")
"""Modules that an image with a GPU may lack."""
BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def pytest_here(folder: Path, *words: str) -> str:
    """pytest's output in a process that has none of the missing modules, no git, and no bytecode cache."""
    (folder / "sitecustomize.py").write_text(BLOCK)
    paths = os.pathsep.join([str(folder), *(str(ROOT / name) for name in ("", "kernels", "launch"))])
    environment = {"PYTHONPATH": paths, "PATH": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_every_file_with_such_a_test_is_in_the_job() -> None:
    listed = {name for names in FILES.values() for name in names}
    marked = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(r"^(pytestmark = |    |@)pytest\.mark\.gpu|add_marker\(pytest\.mark\.gpu", file.read_text(), re.M)
    }
    missing = {file for file in marked if not any(file == name or file.startswith(f"{name}/") for name in listed)}
    assert not missing
    assert all((ROOT / name).exists() for name in listed)


@pytest.mark.long
def test_they_collect_without_the_packages_that_an_image_lacks(tmp_path: Path) -> None:
    files = [name for names in FILES.values() for name in names]
    output = pytest_here(tmp_path, "--collect-only", "-q", "-m", "gpu", *files)
    # Those of Triton's kernels are tests for a GPU only where there is one; elsewhere they run in its interpreter.
    counts = {name: output.count(f"\n{name}") for name in files if name != "tests/kernels/triton"}
    assert all(counts.values()), counts
    assert "error" not in output.splitlines()[-1]


@pytest.mark.long
def test_a_few_of_them_run_on_a_cpu_by_the_jobs_own_command(tmp_path: Path) -> None:
    words = ("-q", "-m", "gpu", "--gpu-device=cpu", "tests/gpu")
    output = pytest_here(tmp_path, *words, "-k", "(float32 and (softmax or topk) and not compiled) or adamw or resumes")
    assert re.search(r"\d+ passed", output)


SUBJECTS = {f"{name}-{entry.name}": (name, entry) for name, entry in subjects()}


@pytest.mark.parametrize("key", ["core-softmax", "router-topk", "norm-rms", "position-rope", "objective-causal"])
def test_a_part_that_differs_on_the_device_is_seen(key: str) -> None:
    """The comparison passes for the same part, and fails for one with another weight, output or missing gradient."""
    name, entry = SUBJECTS[key]
    cpu = torch.device("cpu")
    expected = build(name, entry, cpu, torch.float32)
    check(build(name, entry, cpu, torch.float32), expected, 1e-4)
    part = build(name, entry, cpu, torch.float32)
    with pytest.raises(AssertionError, match="output"):
        check(PartOnDevice(part.module, part.inputs, lambda *inputs: part.call(*inputs) * 1.01), expected, 1e-4)
    if part.inputs:
        halved = PartOnDevice(part.module, part.inputs, lambda *inputs: _half_gradient(part, inputs))
        with pytest.raises(AssertionError, match="input 0"):
            check(halved, expected, 1e-4)


def _half_gradient(part: PartOnDevice, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    first, *others = inputs
    return part.call((first + first.detach()) / 2, *others)


def test_the_relative_difference_is_of_norms() -> None:
    assert relative_difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == pytest.approx(34**-0.5)


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("[gw3] [ 12%] PASSED tests/a.py::test_x[core-softmax] ", ("PASSED", "tests/a.py::test_x[core-softmax]")),
        ("tests/a.py::test_x[a b] FAILED      [ 40%]", ("FAILED", "tests/a.py::test_x[a b]")),
        ("tests/a.py::test_x SKIPPED (needs a CUDA device)", ("SKIPPED", "tests/a.py::test_x")),
        ("FAILED tests/a.py::test_x - AssertionError", None),
        ("==== 3 passed in 2.0s ====", None),
    ],
)
def test_outcomes_are_read(line: str, outcome: tuple[str, str] | None) -> None:
    assert outcome_of(line) == outcome


def test_no_tests_leaves_the_job_empty(tmp_path: Path) -> None:
    context = GpuContext("cpu", toy=True, tests=False, work=tmp_path, out=tmp_path)
    assert cases(context) == []
