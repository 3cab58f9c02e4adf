"""`xscale launch mpi` with a real mpirun, the one on PATH or the one beside this Python; and its parts without one."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from xscale_launch.mpi import mpi, mpi_rank
from xscale_launch.status import LaunchError

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/launch/fake_train.py'}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"train.steps: 4\nrun.dir: {tmp_path / 'run'}\n")
    return path


def command(mpirun: str, *arguments: object) -> list[str]:
    more = ["--mpirun", mpirun, "--xscale", FAKE]
    return [sys.executable, "-m", "xscale_launch", "mpi", *more, *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "launch")}


def launch(mpirun: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(mpirun, *arguments), env=environment(), capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_meet_and_train(mpirun: str, config: Path, tmp_path: Path, ranks: int) -> None:
    done = launch(mpirun, "--processes", ranks, config)
    assert done.returncode == 0, done.stderr
    assert f"rank 0 of {ranks} starts at step 0" in done.stdout
    states = [(tmp_path / "run/state" / f"rank-{rank}.json").read_text() for rank in range(ranks)]
    assert len(set(states)) == ranks
    assert all(state.startswith("[4, ") for state in states)


@pytest.mark.long
def test_redirected_output_is_not_drawn_for_a_terminal(mpirun: str, config: Path, tmp_path: Path) -> None:
    """A worker sees no terminal when the launcher's output is a file: mpirun gives its ranks a pseudo-terminal."""
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT / 'tests/launch')!r})\n")
    with worker.open("a") as program:
        program.write("terminal = os.isatty(1) or os.isatty(2)\n")
        program.write("if sys.argv[1] == 'train': print('\\x1b[2K' if terminal else 'plain', flush=True)\n")
        program.write(f"runpy.run_path({str(ROOT / 'tests/launch/fake_train.py')!r}, run_name='__main__')\n")
    argv = [sys.executable, "-m", "xscale_launch", "mpi", "--mpirun", mpirun]
    argv += ["--xscale", f"{sys.executable} {worker}", "--processes", "2", str(config)]
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(argv, env=environment(), stdout=out, stderr=out, timeout=600, check=False)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said
    assert "plain" in said, said
    assert "\x1b" not in said, said
    assert "rank 0 saved" in said or "starts at step 0" in said, said


def test_the_ranks_come_from_mpi_itself(mpirun: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
    program = (
        "import json, os, socket\n"
        "from xscale_launch.mpi.mpi_rank import rank_from_mpi\n"
        "place = rank_from_mpi()\n"
        f"open('{tmp_path}/' + str(place.rank), 'w').write(json.dumps(place.variables()))\n"
    )
    flags = mpi.flags(subprocess.check_output([mpirun, "--version"], text=True), 2, {}, os.getuid() == 0)
    subprocess.run([mpirun, *flags, sys.executable, "-c", program], env=environment(), check=True, timeout=600)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert (first["RANK"], second["RANK"], first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1", "0", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"


def test_a_signal_saves_and_status_is_75(mpirun: str, config: Path) -> None:
    arguments = ("--processes", 2, config, "train.steps=100000", "fake.step_seconds=0.05")
    process = subprocess.Popen(command(mpirun, *arguments), env=environment(), stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert "starts at step 0" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    assert "rank 0 saved at step" in out


@pytest.mark.long
def test_faults_and_mistakes_keep_their_status(mpirun: str, config: Path) -> None:
    done = launch(mpirun, "--processes", 2, config, "fake.crash_at=2", "fake.crash_rank=1")
    assert done.returncode == 1
    assert "the step fell over" in done.stderr
    assert "rank 1 failed with status 1" in done.stderr
    done = launch(mpirun, "--processes", 2, config, "fake.mistake=witdh")
    assert done.returncode == 2
    assert done.stderr.count("unknown key 'witdh'") == 1


def test_a_layout_that_does_not_fit_starts_nothing(mpirun: str, config: Path, tmp_path: Path) -> None:
    done = launch(mpirun, "--processes", 2, config, "fake.divides=3")
    assert done.returncode == 2
    assert "3 does not divide 2 processes" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_bad_node_starts_nothing(mpirun: str, config: Path, tmp_path: Path) -> None:
    clusters = tmp_path / "clusters.toml"
    clusters.write_text('default = "lab"\n[lab]\nminimum_disk_gigabytes = 1e9\n')
    done = launch(mpirun, "--processes", 2, config, "--clusters", clusters)
    assert done.returncode == 76
    assert f"preflight: {socket.gethostname()}: the run folder's disk has" in done.stderr
    assert "starts at step" not in done.stdout
    done = launch(mpirun, "--processes", 2, config, "--clusters", clusters, "--no-preflight")
    assert done.returncode == 0, done.stderr


def test_variables_reach_the_ranks(mpirun: str, config: Path, tmp_path: Path) -> None:
    clusters = tmp_path / "clusters.toml"
    clusters.write_text('default = "lab"\n[lab]\ninterface = "ib0"\n[lab.environment]\nMINE = "two words"\n')
    shown = launch(mpirun, "--processes", 2, config, "--clusters", clusters, "--hosts", "n1,n2", "--dry-run").stdout
    if "Open MPI" in subprocess.check_output([mpirun, "--version"], text=True):
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MINE", "PYTHONPATH")
        assert all(f"-x {name} " in shown for name in names)
    assert "--preflight --gpus 0 --disk 1" in shown
    assert "bench links' --slowest-link 0" in shown


def test_the_doctor_speaks_once_for_all_ranks(mpirun: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
    flags = mpi.flags(subprocess.check_output([mpirun, "--version"], text=True), 2, {}, os.getuid() == 0)
    words = [sys.executable, "-m", "xscale_launch.doctor", "--folder", str(tmp_path), "--gpus", "0"]
    done = subprocess.run(
        [mpirun, *flags, *words], env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NODE") == 1
    assert done.stdout.count("no problems found") == 1


def test_flags_of_each_kind() -> None:
    openmpi = mpi.flags("mpirun (Open MPI) 4.1.4", 4, {"n1": 2, "n2": 2}, root=True)
    assert "--allow-run-as-root" in openmpi
    assert openmpi[-2:] == ["--host", "n1:2,n2:2"]
    assert "--bind-to" in openmpi
    assert "--oversubscribe" not in openmpi
    assert "--oversubscribe" in mpi.flags("mpirun (Open MPI) 4.1.4", 4096, {}, root=False)
    assert mpi.flags("HYDRA build details:", 4, {"n1": 4}, root=True) == ["-np", "4", "-hosts", "n1:4"]
    with pytest.raises(LaunchError, match="neither Open MPI's nor MPICH's"):
        mpi.flags("something else", 2, {}, root=False)


def test_hosts_have_to_make_the_processes() -> None:
    def options(hosts: str, processes: int) -> argparse.Namespace:
        return argparse.Namespace(hosts=hosts, processes=processes)

    assert mpi.hosts(options("n1:2,n2", 3)) == {"n1": 2, "n2": 1}
    assert mpi.hosts(options("", 3)) == {}
    with pytest.raises(LaunchError, match="slots for 3 ranks, but --processes is 4"):
        mpi.hosts(options("n1:2,n2", 4))
    with pytest.raises(LaunchError, match="write host:ranks"):
        mpi.hosts(options("n1:x", 4))


def test_one_host_meets_on_loopback_and_several_where_they_can() -> None:
    here = socket.gethostname()
    assert mpi_rank.rendezvous_address([here, here])[0] == "127.0.0.1"
    address, port = mpi_rank.rendezvous_address([here, "127.0.0.5"])
    assert address.startswith("127.")
    assert 0 < port < 65536


def test_without_mpi4py_the_variables_serve_on_one_host() -> None:
    said = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    place = mpi_rank.rank_from_variables(said, "127.0.0.1:4000")
    assert (place.rank, place.world_size, place.local_rank, place.master_port) == (1, 2, 1, 4000)
    with pytest.raises(LaunchError, match="pip install"):
        mpi_rank.rank_from_variables(said, None)
    with pytest.raises(LaunchError, match="no MPI started this process"):
        mpi_rank.rank_from_variables({}, "127.0.0.1:4000")
