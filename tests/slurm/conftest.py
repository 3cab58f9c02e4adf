"""One Slurm cluster for all tests of this folder; where the machine forbids it, the skip says what is missing."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/launch/fake_train.py'}"


def _module(name: str) -> ModuleType:
    """A file of this folder as a module: tests are imported without packages."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


class Lab:
    """The cluster, and the launcher called against it as a user would."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.config = folder / "run.yaml"
        self.config.write_text("train.steps: 4\nfake.step_seconds: 0.05\n")
        self.run = folder / "run"

    def launch(self, *arguments: object, xscale: str = FAKE) -> subprocess.CompletedProcess[str]:
        """`xscale launch ...`, from the repository's root."""
        words = [str(word) for word in arguments]
        if words[0] in ("slurm", "mpi", "local"):
            words[1:1] = ["--xscale", xscale]
        environment = {**self.cluster.environment(), "PYTHONPATH": str(ROOT / "launch")}
        command = [sys.executable, "-m", "xscale_launch", *words]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )

    def submit(self, *arguments: object) -> str:
        """Submits the stand-in on 2 x 2 processes (`arguments` come later and win); the first job's id."""
        usual = ("--nodes", 2, "--processes-per-node", 2, "--time", 10, f"run.dir={self.run}")
        done = self.launch("slurm", self.config, *usual, *arguments)
        assert done.returncode == 0, done.stderr
        return str(json.loads((self.run / "launch/jobs.jsonl").read_text().splitlines()[0])["id"])

    def step(self, run: Path | None = None) -> int:
        """The last step that rank 0 wrote."""
        metrics = (run or self.run) / "metrics.jsonl"
        lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
        return max((int(json.loads(line)["step"]) for line in lines), default=0)

    def wait_step(self, step: int, seconds: float = 60) -> None:
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
def cluster() -> Iterator[Any]:
    """Three virtual nodes, up for the whole session."""
    module = _module("cluster")
    with tempfile.TemporaryDirectory(prefix="xscale-slurm-") as folder:
        one = module.Cluster(Path(folder), nodes=3)
        try:
            one.up()
        except module.MissingError as missing:
            pytest.skip(f"no Slurm cluster on this machine: {missing}")
        try:
            yield one
        finally:
            one.down()


@pytest.fixture
def lab(cluster: Any, tmp_path: Path) -> Iterator[Lab]:
    """The cluster for one test; its jobs are gone afterwards."""
    cluster.mend()
    lab = Lab(cluster, tmp_path)
    yield lab
    if (lab.run / "launch/jobs.jsonl").exists():
        lab.launch("cancel", lab.run)
        cluster.wait(lambda: not cluster.run("squeue", "-h").strip(), 40, "the queue to be empty after the test")
