"""The wheel of this tree: built without a network, and installed into a fresh virtual environment elsewhere."""

import importlib.util
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = "#!{python}\nfrom torch.distributed.run import main\n\nmain()\n"


def build_wheel(folder: Path) -> Path:
    """Build the wheel in `folder`, and return its file."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install hatchling")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(folder), str(ROOT)], check=True, timeout=300, cwd=folder)
    (wheel,) = folder.glob("xscale-*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment in `folder` with the wheel and this Python's packages; return its programs' folder.

    The packages are those of this environment, by a `.pth` file, without what this environment finds by `.pth` files of
    its own, such as the checkout.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_paths()["purelib"]]
    (site / "packages.pth").write_text("\n".join(packages) + "\n", encoding="utf-8")
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "-q"]
    subprocess.run(
        [*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True, timeout=300, cwd=folder
    )
    (programs / "torchrun").write_text(TORCHRUN.format(python=programs / "python"), encoding="utf-8")
    (programs / "torchrun").chmod(0o755)
    return programs
