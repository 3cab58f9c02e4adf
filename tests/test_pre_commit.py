"""The hooks of .pre-commit-config.yaml run on this tree, and say what is wrong with a file that breaks their rules."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with this tree's tracked files, all of them staged."""
    folder = tmp_path_factory.mktemp("hooks")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def hooks(folder: Path, *words: str, skip: str = "") -> subprocess.CompletedProcess[str]:
    """Run the hooks of a commit as `git commit` does, with this Python's tools first."""
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    environment["SKIP"] = skip
    return subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_hooks_of_a_commit_pass_on_this_tree(checkout: Path) -> None:
    done = hooks(checkout, "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") == 4, done.stdout
    assert git(checkout, "diff", "--stat") == ""


@pytest.mark.parametrize(
    ("path", "text", "hook"),
    [
        ("xscale/core/wrong.py", '"""A file."""\n\nimport torch as _torch  # noqa: F401\n', "law of imports"),
        ("xscale/core/wrong.py", '"""A file."""\n\n\ndef add(a,b): return a+b\n', "ruff format"),
        ("xscale/core/wrong.py", '"""A file."""\n\n\ndef add() -> int:\n    return missing\n', "ruff check"),
    ],
    ids=["import-upwards", "format", "lint"],
)
def test_a_commit_that_breaks_a_rule_is_refused(checkout: Path, path: str, text: str, hook: str) -> None:
    (checkout / path).write_text(text, encoding="utf-8")
    git(checkout, "add", path)
    try:
        done = hooks(checkout, skip="" if hook == "law of imports" else "imports,schema")
    finally:
        git(checkout, "rm", "-q", "-f", path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line.split(".")[0] for line in done.stdout.splitlines() if line.endswith("Failed")]
    assert failed == [hook], done.stdout


def test_the_types_and_all_laws_are_checked_at_a_push(checkout: Path) -> None:
    """They take minutes, so they are not run here: CI runs both."""
    done = hooks(checkout, "--hook-stage", "pre-push", "--files", "README.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(".")[0] for line in done.stdout.splitlines() if "Skipped" in line] == ["mypy", "laws"]
