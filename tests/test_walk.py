"""The documentation walked as by a new user: the wheel in a fresh environment, an empty folder, every block in order.

`pytest -s tests/test_walk.py -k mixture` prints how long each step takes from nothing to an exported mixture.
"""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.test_docs import PAGES, commands, shortened, start, titled_blocks
from tests.wheel import ROOT, build_wheel, install_wheel

OWN_TEXT = ["README.md", "docs"]
"""Text that the reader has in the folder where he begins, and nothing of xscale."""
MAKE = ("make ", "source ")
"""Commands of a checkout; the wheel is installed in their place."""
TUTORIAL = ROOT / "docs/tutorial.md"
MIXTURE = "## Train a mixture of your own on text of your own"

pytestmark = [pytest.mark.nightly, pytest.mark.long]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a fresh environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    return install_wheel(build_wheel(folder), folder / "venv")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder, with text of his own; he keeps it from page to page."""
    folder = tmp_path_factory.mktemp("reader")
    for name in OWN_TEXT:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    return folder


def typed(command: str, reader: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """Type a command in the reader's folder; a status other than 0 fails with both streams."""
    done = start(command, reader, programs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def in_few_steps(command: str, package: Path) -> str:
    """The command shortened; its text is the installed package's, and a ladder has a copy of the configs."""
    short = shortened(command, f"{package}/core/**/*.py, {package}/nn/**/*.py")
    return f"mkdir -p short && cd short && cp -r {package}/configs . && {short}" if " ladder " in command else short


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_walked(page: Path, reader: Path, programs: Path) -> None:
    where = typed("python -c 'import xscale; print(xscale.__path__[0])'", reader, programs).stdout.strip()
    assert where.startswith(str(programs.parent)), "the wheel is what is walked"
    for name, text in titled_blocks(page).items():
        if not name.startswith("configs/"):
            (reader / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        if command.startswith("xscale bench "):
            # Some benchmarks run their operators' tests first, which a checkout alone has, and say so.
            done = start(in_few_steps(command, Path(where)), reader, programs)
            assert done.returncode == 0 or "Run it in a checkout of the repository" in done.stderr, done.stderr
        elif not command.startswith(MAKE):
            typed(in_few_steps(command, Path(where)), reader, programs)


def mixture_section() -> str:
    return TUTORIAL.read_text(encoding="utf-8").split(MIXTURE)[1].split("\n## ")[0]


def test_from_nothing_to_a_mixture_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of the tutorial as they stand, with the time of each step: for people, held to nothing."""
    for name in OWN_TEXT:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    begin = time.perf_counter()
    programs = install_wheel(build_wheel(tmp_path), tmp_path / "venv")
    steps = [("build the wheel, install it", time.perf_counter() - begin, "")]
    (tmp_path / "my_mixture.yaml").write_text(titled_blocks(TUTORIAL)["my_mixture.yaml"], encoding="utf-8")
    block = re.findall(r"```sh\n(.*?)```", mixture_section(), re.DOTALL)[0]
    for command in block.splitlines():
        begin = time.perf_counter()
        done = typed(command, tmp_path, programs)
        steps.append((command, time.perf_counter() - begin, (done.stdout.strip() or done.stderr).splitlines()[-1]))
    assert (tmp_path / "exported_mixture/config.json").is_file()
    with capsys.disabled():
        print()
        for step, seconds, said in steps:
            print(f"{seconds:7.1f} s  {step}\n           {said}")
        print(f"{sum(seconds for _, seconds, _ in steps):7.1f} s  in all")
