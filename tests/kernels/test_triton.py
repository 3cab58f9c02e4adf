"""The Triton kernels' tests, run in one more process, where Triton's interpreter is on from its first import."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.kernels.triton.conftest import interpreter_problem

FOLDER = Path(__file__).parent / "triton"
FILES = sorted(path.stem for path in FOLDER.glob("test_*.py"))
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ElementTree.Element:
    """The other process's results, one `testcase` a test."""
    file = tmp_path_factory.mktemp("triton") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert file.exists(), done.stdout + done.stderr
    return ElementTree.parse(file).getroot()


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(report: ElementTree.Element, file: str) -> None:
    cases = [case for case in report.iter("testcase") if case.get("classname", "").split(".")[-1] == file]
    assert cases, f"{file} was not collected: {ElementTree.tostring(report, encoding='unicode')[:4000]}"
    for case in cases:
        wrong = [each.text for kind in ("failure", "error") for each in case.iter(kind)]
        assert not wrong, f"{case.get('name')}: {wrong[0]}"
        skipped = case.find("skipped")
        if skipped is not None and "is not installed" in skipped.get("message", ""):
            pytest.skip(skipped.get("message", ""))
        assert skipped is None, f"{case.get('name')} was skipped"


@pytest.mark.parametrize(
    ("triton", "numpy", "problem"),
    [("3.6.0", "2.4.6", False), ("3.6.0", "2.5.2", True), ("3.7.1", "2.5.2", False), ("3.6.0", "3.0.0", True)],
)
def test_a_numpy_that_the_interpreter_cannot_take_is_named(triton: str, numpy: str, problem: bool) -> None:
    text = interpreter_problem(triton, numpy)
    assert (text is not None) == problem
    if text is not None:
        assert text.endswith(f"needs numpy < 2.5, and numpy {numpy} is installed")
