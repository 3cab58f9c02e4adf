"""Copy a run's code and config into its folder, so that a later edit does not change a queued job."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

from xscale_launch.files import make_run_folder, remove_folder, write_run_file
from xscale_launch.status import LaunchError

PACKAGES = ("xscale", "xscale_kernels", "xscale_launch")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", ".git", "results")


def code(run: Path, extra: list[Path]) -> Path:
    """Copy the installed packages and the user's `extra` modules into `run/launch/code`.

    An existing copy is replaced only when the new copy is complete.
    """
    folder = make_run_folder(run, "launch")
    target = folder / "code"
    remove_folder(folder, "code.part")
    part = make_run_folder(folder, "code.part")
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            shutil.copytree(
                next(iter(spec.submodule_search_locations)), part / name, ignore=LEFT_OUT
            )
    for path in extra:
        if not path.exists():
            raise LaunchError(f"--with-code {path}: no such module or package")
        if path.is_dir():
            shutil.copytree(path, part / path.name, ignore=LEFT_OUT)
        else:
            shutil.copy2(path, part / path.name)
    write_run_file(part / "COMMIT", commit() + "\n")
    remove_folder(folder, target.name)
    part.rename(target)
    return target


def config(run: Path, resolved: str) -> Path:
    """Write the resolved config to `run/launch/config.yaml`."""
    path = make_run_folder(run, "launch") / "config.yaml"
    write_run_file(path, resolved)
    return path


def commit() -> str:
    """Return the commit of the checkout that contains the launcher, with `+changes` if it was edited."""
    package = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", package, "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        dirty = subprocess.run(
            ["git", "-C", package, "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return "git is not installed"
    if head.returncode:
        return "not a git checkout"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
