"""One Slurm cluster for all tests of this folder; where the machine forbids it, the skip says what is missing."""

import concurrent.futures
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.packages import MissingError
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/launch/fake_train.py'}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Option for CI on a machine where a cluster can be had: then a skip would hide that nothing was tested."""
    parser.addoption("--cluster-required", action="store_true", help="fail where no Slurm cluster can be brought up")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the cluster; a file ends with the outcomes of what goes on meanwhile."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slurm)
    order = {path: index for index, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (order[item.path], item.get_closest_marker("meanwhile") is not None))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Awaits the outcome of a test that runs meanwhile."""
    started = pyfuncitem.config.stash.get(MEANWHILE, {}).get(pyfuncitem.nodeid)
    if started is None:
        return None
    started.result()
    return True


MEANWHILE = pytest.StashKey[dict[str, "concurrent.futures.Future[None]"]]()
AT_ONCE = 4
"""Tests that go on meanwhile; each takes up to two nodes."""
FIGURES = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Figures that the tests have measured, printed even when all is well."""
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("how long it took")
        terminalreporter.write_line("\n".join(figures))


class Lab:
    """The cluster, and the launcher called against it as a user would."""

    def __init__(self, cluster: Cluster, folder: Path, figures: list[str], usual: tuple[str, ...] = ()) -> None:
        """`usual`: options of every submission."""
        self.cluster, self.usual = cluster, usual
        self.figure = figures.append
        self.config = folder / "run.yaml"
        self.config.write_text("train.steps: 4\nfake.step_seconds: 0.05\n")
        self.run = folder / "run"

    def launch(self, *arguments: object, xscale: str = FAKE) -> subprocess.CompletedProcess[str]:
        """`xscale launch ...`, from the repository's root; `xscale` is the stand-in, or empty for xscale itself."""
        words = [str(word) for word in arguments]
        path = str(ROOT / "launch")
        if words[0] in ("slurm", "mpi", "local") and xscale:
            words[1:1] = ["--xscale", xscale]
        elif not xscale:
            path = f"{ROOT}:{ROOT / 'kernels'}:{path}"
        kept = str(self.config.parent / "cache")
        environment = {**self.cluster.environment(), "PYTHONPATH": path, "XDG_CACHE_HOME": kept}
        command = [sys.executable, "-m", "xscale_launch", *words]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )

    def submit(self, *arguments: object) -> str:
        """Submits the stand-in on 2 x 2 processes (`arguments` come later and win); the first job's id."""
        usual = (*self.usual, "--nodes", 2, "--processes-per-node", 2, "--time", 10, f"run.dir={self.run}")
        done = self.launch("slurm", self.config, *usual, *arguments)
        assert done.returncode == 0, done.stderr
        return str(json.loads((self.run / "launch/jobs.jsonl").read_text().splitlines()[0])["id"])

    def step(self, run: Path | None = None) -> int:
        """The last step that rank 0 wrote."""
        metrics = (run or self.run) / "metrics.jsonl"
        lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
        return max((int(json.loads(line)["step"]) for line in lines), default=0)

    def wait_step(self, step: int, seconds: float = 120) -> None:
        """Waits until the run is past a step."""
        self.cluster.wait(lambda: self.step() >= step, seconds, f"step {step} of {self.run}")

    def log(self, run: Path | None = None) -> str:
        """Everything that the jobs of the run have printed."""
        return "".join(path.read_text() for path in sorted(((run or self.run) / "launch/output").glob("*.log")))

    def states(self, run: Path | None = None, ranks: int = 4) -> list[str]:
        """The final state of every rank."""
        return [((run or self.run) / "state" / f"rank-{rank}.json").read_text() for rank in range(ranks)]

    def expected(self, steps: int, ranks: int = 4) -> list[str]:
        """The same of a run that nothing interrupts, on one machine without Slurm."""
        whole = self.run.parent / "whole"
        done = self.launch("local", "--processes", ranks, self.config, f"run.dir={whole}", f"train.steps={steps}",
                           "fake.step_seconds=0")  # fmt: skip
        assert done.returncode == 0, done.stderr
        return self.states(whole, ranks)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three virtual nodes, and those of the tests that go on meanwhile, up for the whole session."""
    later = [item for item in request.session.items if item.get_closest_marker("meanwhile")]
    with tempfile.TemporaryDirectory(prefix="xscale-slurm-") as folder:
        one = Cluster(Path(folder), nodes=3, apart=2 * min(AT_ONCE, len(later)))
        try:
            one.up()
        except MissingError as missing:
            reason = f"no Slurm cluster on this machine: {missing}"
            if request.config.getoption("--cluster-required", default=False):
                pytest.exit(reason, returncode=1)
            pytest.skip(reason)
        pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
        try:
            begin(later, one, Path(folder), pool, request.config)
            yield one
        finally:
            pool.shutdown(cancel_futures=True)
            one.down()


def begin(
    items: list[pytest.Item],
    cluster: Cluster,
    folder: Path,
    pool: concurrent.futures.Executor,
    config: pytest.Config,
) -> None:
    """Starts the tests that spend their time waiting for Slurm, several at once, on nodes apart."""
    started = config.stash.setdefault(MEANWHILE, {})
    for number, item in enumerate(items):
        assert isinstance(item, pytest.Function)
        given = {**(item.callspec.params if hasattr(item, "callspec") else {}), "lab": None}
        assert set(inspect.signature(item.function).parameters) == set(given), f"{item.nodeid} wants more than a lab"
        started[item.nodeid] = pool.submit(_alone, item.function, given, cluster, folder / f"meanwhile-{number}")


def _alone(test: Callable[..., None], given: dict[str, Any], cluster: Cluster, folder: Path) -> None:
    """One such test in a folder of its own."""
    folder.mkdir()
    lab = Lab(cluster, folder, [], ("--partition", "apart"))
    try:
        test(**{**given, "lab": lab})
    finally:
        if (lab.run / "launch/jobs.jsonl").exists():
            lab.launch("cancel", lab.run)


@pytest.fixture
def lab(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The cluster for one test; its jobs are gone afterwards."""
    lab = Lab(cluster, tmp_path, request.config.stash.setdefault(FIGURES, []))
    if request.node.get_closest_marker("meanwhile"):
        yield lab
        return
    cluster.mend()
    yield lab
    if (lab.run / "launch/jobs.jsonl").exists():
        lab.launch("cancel", lab.run)
        cluster.wait(lambda: not cluster.queue(), 40, "the queue to be empty after the test")
