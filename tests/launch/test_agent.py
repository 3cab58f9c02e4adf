"""The agent, started as Slurm's tasks would start it, with Slurm's variables and without Slurm."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import free_ports
from xscale_launch import attempts, status
from xscale_launch.nodes import node_check, preflight

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(ROOT / "tests/launch/fake_train.py"), "train"]


class Job:
    """A job of some nodes that are all this machine; each agent is one task."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.run, self.attempt, self.nodes = folder / "run", folder / "attempt", nodes
        self.config = folder / "run.yaml"
        self.config.write_text(f"train.steps: 4\nrun.dir: {self.run}\n")
        self.attempt.mkdir()
        self.port = free_ports(2)
        self.tools = folder / "bin"
        self.tools.mkdir()

    def variables(self, task: int) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PYTHONPATH": str(ROOT / "launch"),
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "SLURM_PROCID": str(task),
            "SLURM_NTASKS": str(self.nodes),
            "SLURM_NNODES": str(self.nodes),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(task),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": f"n[1-{self.nodes}]",
            "SLURMD_NODENAME": f"n{task + 1}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    def start(self, task: int, *options: object, trainer: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = ["--attempt", self.attempt, "--outputs", self.run / "logs", "--disk", "0", *options, "--", *FAKE]
        command = [sys.executable, "-m", "xscale_launch.agent", *map(str, words), str(self.config), *trainer]
        return subprocess.Popen(command, env=self.variables(task), stdout=-1, stderr=-1, text=True)

    def ended(self, *tasks: subprocess.Popen[str]) -> tuple[list[int], str]:
        """The statuses of the tasks and everything that they said."""
        said = "".join("".join(task.communicate(timeout=600)) for task in tasks)
        return [task.returncode for task in tasks], said

    def left(self) -> set[str]:
        return {path.name for path in self.attempt.iterdir()} - {"bad_nodes"}


def listens(port: int) -> bool:
    """Whether a socket of this machine listens on `port`; another may have the number at either end of a connection."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(local.endswith(f":{port:04X}") and state == "0A" for _, local, _, state, *_ in rows)


def test_two_nodes_of_two_workers(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    statuses, said = job.ended(*[job.start(task, "--processes", 2) for task in range(2)])
    assert statuses == [0, 0], said
    assert "rank 0 of 4 starts" in said
    assert job.left() == {"ended-0", "ended-2"}


def test_a_task_that_saved_ends_well_and_leaves_75(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    statuses, said = job.ended(job.start(0, "--processes", 2, trainer=("fake.stop_after=2",)))
    assert statuses == [0], said
    assert (job.attempt / "ended-0").read_text() == "75\n"


def test_a_fault_leaves_its_cause(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    statuses, said = job.ended(job.start(0, "--processes", 2, trainer=("fake.crash_at=1", "fake.crash_rank=1")))
    assert statuses == [1]
    first, cause = (job.attempt / "fault").read_text().splitlines()[:2]
    assert first == "1"
    assert cause.startswith("n1: rank 1 failed with status 1")
    assert "the step fell over" in said


@pytest.mark.parametrize("refused", [False, True])
def test_a_worker_stopped_by_a_refused_config_says_nothing(tmp_path: Path, refused: bool) -> None:
    """srun ends the other tasks after rank 0's; a worker may have printed its own refusal when SIGTERM kills it."""
    job = Job(tmp_path, 2)
    if refused:
        attempts.report_config_refused(job.attempt, rank_0_refused=True, has_rank_0=True)
    worker = ["sh", "-c", "echo \"config: unknown key 'witdh'\"; kill -TERM $$"]
    words = ["--attempt", job.attempt, "--outputs", job.run / "logs", "--no-preflight", "--", *worker]
    command = [sys.executable, "-m", "xscale_launch.agent", *map(str, words)]
    statuses, said = job.ended(subprocess.Popen(command, env=job.variables(1), stdout=-1, stderr=-1, text=True))
    assert statuses == [128 + signal.SIGTERM]
    assert said.count("unknown key 'witdh'") == (0 if refused else 1)


def test_a_bad_gpu_stops_the_job_before_the_trainer(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    smi = job.tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && exit 9\necho "0, H200, 143771, 4, 0, 30"\n')
    smi.chmod(0o755)
    statuses, said = job.ended(*[job.start(task, "--gpus", 1) for task in range(2)])
    assert statuses == [76, 76], said
    assert "n2: its GPUs cannot be queried" in (job.attempt / "fault").read_text()
    assert (job.attempt / "bad_nodes").read_text() == "n2\n"
    assert not job.run.exists()


def test_a_port_that_somebody_holds_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    with socket.create_server(("", 0)) as taken:
        job.port = taken.getsockname()[1]
        statuses, _ = job.ended(job.start(0))
    assert statuses == [76]
    assert f"port {job.port} cannot be used on this machine" in (job.attempt / "fault").read_text()


def test_outside_slurm_it_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    variables = {name: value for name, value in job.variables(0).items() if name != "SLURM_PROCID"}
    command = [
        sys.executable,
        "-m",
        "xscale_launch.agent",
        "--attempt",
        str(job.attempt),
        "--outputs",
        "x",
        "--",
        "true",
    ]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "SLURM_PROCID" in (job.attempt / "fault").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "status", "said"),
    [
        ("", "0", ""),
        ("n1", "0", "n1: its link to n2 reaches 1.00 GB/s, the minimum is 5"),
        ("", "1", "cannot be measured"),
    ],
)
def test_links_are_measured_before_any_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, status: str, said: str
) -> None:
    monkeypatch.setenv("FAKE_SLOW", slow)
    monkeypatch.setenv("FAKE_LINKS_STATUS", status)
    job = Job(tmp_path, 2)
    words = ("--links", f"{' '.join(FAKE[:-1])} bench links", "--slowest-link", "5", "--stop-seconds", "2")
    first, second = [job.start(task, *words) for task in range(2)]
    if said and first.wait(timeout=600):  # srun ends the others when one task fails
        second.terminate()
    statuses, output = job.ended(first, second)
    if not said:
        assert statuses == [0, 0], output
        assert "1 link between nodes: median 10.00 GB/s" in output
        return
    assert statuses[0] == 76, output
    assert said in (job.attempt / "fault").read_text()
    assert (job.attempt / "bad_nodes").exists() == (slow == "n1")
    assert "rank 0 of 2 starts" not in output


def test_a_signal_during_the_preflight_is_no_crash(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    first = job.start(0)
    while not listens(job.port + 1):  # the head node, for the other one
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    other = preflight.facts("n2", "127.0.0.1", tmp_path, ROOT / "launch", 0)
    assert node_check.send_report("127.0.0.1", job.port + 1, {**preflight.as_data(other), "task": 1}, 20) == []
    statuses, said = job.ended(first)
    assert statuses == [0], said
    assert "SIGUSR1: signalled 1 worker to save and stop" in said
    assert attempts.read_attempt(job.attempt, 1, 0) == (status.RESUMABLE, "")


@pytest.mark.long
def test_torchrun_inside_keeps_the_statuses(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job(tmp_path, 1)
    statuses, said = job.ended(job.start(0, "--processes", 2, "--torchrun", trainer=("fake.stop_after=2",)))
    assert statuses == [0], said
    assert job.left() == {"ended-0", "go_on"}
    (job.attempt / "go_on").unlink()
    statuses, said = job.ended(job.start(0, "--processes", 2, "--torchrun", trainer=("fake.mistake=witdh",)))
    assert statuses != [0]
    assert (job.attempt / "fault").read_text().startswith("2\n"), said
