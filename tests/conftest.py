"""Fixtures of every test: one thread a process, the pool of ranks, and a printed reason where a GPU is missing."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: the tests' tensors are small, and more threads than that fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # Not the cache that all of the user's processes share: one that was killed while it compiled leaves a library there
    # that is cut short, with which every later compilation of the same code fails.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor-tests-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a script. What tests start would inherit it, and never hear of an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

from tests.distributed import Pool
from tests.packages import MissingError, provide

# An example's time is the machine's, which others use too; a test that hangs is seen without it. The examples are the
# same in every run, so that a change fails for what it changed; `--hypothesis-profile=fresh` draws others.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fresh", deadline=None)
hypothesis.settings.load_profile("house")


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def rank_variables() -> Iterator[None]:
    """Fail the test that leaves the variables of a rank behind: a later one would take itself for a rank."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    after = {name: os.environ.get(name) for name in RANK_VARIABLES}
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    assert after == before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=8, help="how often the trainer is killed at random (default: 8)")
    parser.addoption("--layouts", type=int, default=60, help="how many random layouts are trained or refused")
    parser.addoption("--grammars", type=int, default=1000, help="how many hostile files each grammar draws")
    parser.addoption("--grammar-seed", type=int, default=0, help="seed of the first; those after it follow")
    parser.addoption("--disk-seed", type=int, default=0, help="added to the seeds of the disks that fail")
    parser.addoption("--gpu-device", default="cuda", help="cpu runs the machinery of tests/gpu on a CPU")
    help_ = "seed of the first, from which those after it follow (default: 0; 20261127 for the layouts of recipes)"
    parser.addoption("--layout-seed", type=int, default=None, help=help_)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests on several ranks: `pool.run(function, ranks, *arguments)`."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def mpirun() -> str:
    """The mpirun on PATH, the one beside this Python, or Debian's Open MPI, installed for the tests that ask for it."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if beside is None:
        try:
            provide(("mpirun",), ("openmpi-bin",))
        except MissingError as missing:
            pytest.skip(str(missing))
    program = shutil.which("mpirun") or beside
    assert program is not None
    return program


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the tests and their modules, millions of objects: each collection of garbage would walk through them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        sampled = item.get_closest_marker("sampled")
        # By its name, so that a change of other cases does not change which of them stay.
        if sampled and zlib.crc32(item.name.encode()) % sampled.args[0]:
            item.add_marker("nightly")
        if item.get_closest_marker("nightly"):
            item.add_marker("long")
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if config.getoption("--gpu-device") != "cpu" and not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
