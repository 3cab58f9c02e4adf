"""`xscale launch local` with a stand-in for the trainer: ranks, signals, faults, exit statuses, no hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xscale_launch.command import check_config
from xscale_launch.nodes.devices import free_port
from xscale_launch.status import LaunchError

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/launch/fake_train.py'}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"train.steps: 4\nrun.dir: {tmp_path / 'run'}\n")
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "xscale_launch", "local", "--xscale", FAKE, *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": str(ROOT / "launch"), **more}


def launch(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(**more), capture_output=True, text=True, timeout=600, check=False
    )


def started(*arguments: object) -> subprocess.Popen[str]:
    """The launcher once rank 0 has begun to train."""
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert "starts at step" in process.stdout.readline()
    return process


def test_every_rank_trains_and_only_rank_0_speaks(config: Path, tmp_path: Path) -> None:
    done = launch("--processes", 3, config, f"run.dir={tmp_path / 'r'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"rank 0 of 3 starts at step 0 on {socket.gethostname()}",
        "rank 0 done at step 4",
    ]
    assert "rank 2 done at step 4" in (tmp_path / "r/logs/rank-2.log").read_text()
    assert done.stderr == ""


LISTENERS = """
import datetime, json, os, pathlib, sys
import psutil, torch
import torch.distributed as dist
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import init_process_group
rank = read_rank_info()
init_process_group(rank, "gloo", datetime.timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
sockets = psutil.Process().net_connections("inet")
listening = sorted({s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN})
pathlib.Path(os.environ["LISTENERS"], str(rank.rank)).write_text(json.dumps(listening))
dist.barrier()
"""


@pytest.mark.long
def test_a_local_run_listens_on_loopback_only(config: Path, tmp_path: Path) -> None:
    """Real ranks with torch's store and gloo: nothing that they listen on can be reached from another machine."""
    worker = tmp_path / "worker.py"
    worker.write_text(LISTENERS)
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    argv = [sys.executable, "-m", "xscale_launch", "local", "--xscale", f"{sys.executable} {worker}"]
    done = subprocess.run(
        [*argv, "--processes", "2", str(config)],
        env=environment(PYTHONPATH=paths, LISTENERS=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    addresses = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert addresses[0], "rank 0 serves the store"
    assert {address for listening in addresses for address in listening} <= {"127.0.0.1", "::1"}, addresses


def test_gloo_of_a_local_run_is_at_the_loopback_interface(config: Path) -> None:
    """Without it gloo listens where the machine's name leads, which is an address of its network on many machines."""
    assert "GLOO_SOCKET_IFNAME=lo" in launch("--processes", 2, "--dry-run", config).stdout


def test_threads_are_shared_out_unless_the_user_chose(config: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert f"OMP_NUM_THREADS={max(1, cores // 2)}" in launch("--processes", 2, "--dry-run", config).stdout
    assert "OMP_NUM_THREADS" not in launch("--processes", 2, "--dry-run", config, OMP_NUM_THREADS="7").stdout


@pytest.mark.parametrize("rank", [0, 2])
def test_a_fault_ends_all_and_is_named(config: Path, rank: int) -> None:
    done = launch("--processes", 3, config, "train.steps=10000", "fake.crash_at=2", f"fake.crash_rank={rank}")
    assert done.returncode == 1
    assert "the step fell over" in done.stderr
    assert f"rank {rank} failed with status 1; the other workers were stopped" in done.stderr


def test_a_killed_worker_is_named_with_its_signal(config: Path) -> None:
    kill = ("fake.crash_at=2", "fake.crash_rank=1", "fake.kill_self=9", "train.steps=10000")
    done = launch("--processes", 2, config, *kill)
    assert done.returncode == 128 + 9
    assert "rank 1 killed by SIGKILL" in done.stderr


def test_a_mistake_is_said_once_and_is_status_2(config: Path) -> None:
    done = launch("--processes", 4, config, "fake.mistake=witdh")
    assert done.returncode == 2
    assert done.stderr.count("unknown key 'witdh'") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_saves_and_a_second_start_goes_on(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    arguments = ("--processes", 2, config, "train.steps=60", f"run.dir={tmp_path / 'r'}")
    process = started(*arguments, "fake.step_seconds=0.5")
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    assert "rank 0 saved at step" in out
    again = launch(*arguments, "fake.step_seconds=0")
    assert again.returncode == 0
    assert "starts at step 0" not in again.stdout
    whole = launch("--processes", 2, config, "train.steps=60", f"run.dir={tmp_path / 'whole'}", "fake.step_seconds=0")
    assert whole.returncode == 0
    for rank in range(2):
        name = f"state/rank-{rank}.json"
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_workers_deaf_to_signals_are_killed_after_the_grace(config: Path) -> None:
    process = started("--processes", 2, "--grace-seconds", 1, config, "train.steps=10000", "fake.ignore_signals=1")
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 137
    assert "was killed before it saved (limit 1 s after the signal)" in err


def test_a_second_interrupt_does_not_wait(config: Path) -> None:
    process = started("--processes", 2, config, "train.steps=10000", "fake.ignore_signals=1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 137


def test_workers_stop_when_the_launcher_is_killed(config: Path, tmp_path: Path) -> None:
    process = started("--processes", 2, config, "train.steps=10000", f"run.dir={tmp_path / 'r'}")
    process.kill()
    log = tmp_path / "r/logs/rank-1.log"
    deadline = time.monotonic() + 600
    while "rank 1 saved at step" not in log.read_text():
        assert time.monotonic() < deadline, "rank 1 outlived its launcher"
        time.sleep(0.05)
    process.communicate(timeout=600)


def test_a_port_in_use_is_said(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch("--processes", 2, "--port", port, config)
    assert done.returncode == 2
    assert f"port {port} cannot be used on this machine" in done.stderr


def test_a_free_port_is_taken(config: Path) -> None:
    for _ in range(5):
        done = launch("--processes", 1, "--port", free_port(), config)
        if done.returncode == 0:
            break
        # Another program was faster.
        assert "already in use" in done.stderr
    assert done.returncode == 0


def test_a_name_stands_for_its_recipe() -> None:
    recipes = ROOT / "configs" / "xformer"
    assert check_config("bigbird", []) == recipes / "bigbird.yaml"
    assert check_config("sparse_transformer", []) == recipes / "sparse-transformer.yaml"
    assert check_config("reformer", []) == recipes / "reformer-lsh.yaml"
    assert check_config("quickstart", []) == ROOT / "configs" / "run" / "quickstart.yaml"
    assert check_config("switch_1.6t", []) == ROOT / "configs" / "run" / "switch_1.6t.yaml"
    with pytest.raises(LaunchError, match=r"several recipes .* performer-favor"):
        check_config("performer", [])
    with pytest.raises(LaunchError, match="config nothing does not exist"):
        check_config("nothing", [])
    with pytest.raises(LaunchError, match=r"did you mean quickstart\? `xscale list recipes` shows"):
        check_config("quikstart.yaml", [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "2", "nowhere.yaml"], "config nowhere.yaml does not exist"),
        (["--processes", "0", "CONFIG"], "--processes must be at least 1, got 0"),
        (["CONFIG", "train.steps"], "'train.steps' is not an override"),
        (["CONFIG", "--port", "99999"], "99999 is not a port"),
        (["--xscale", "/nowhere/python", "CONFIG", "--processes", "1"], "/nowhere/python cannot be started"),
        (["--proceses", "2", "CONFIG"], "no option --proceses; did you mean --processes?"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(config: Path, arguments: list[str], said: str) -> None:
    done = launch(*[str(config) if text == "CONFIG" else text for text in arguments])
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
