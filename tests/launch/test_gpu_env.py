"""Variables that the launcher adds for workers with GPUs, and the CPUs that it binds them to."""

import os
import resource
import sys
from pathlib import Path

import pytest

from xscale_launch.env import RankEnv
from xscale_launch.mpi.mpi import forwarded_variables
from xscale_launch.nodes import gpu_env
from xscale_launch.nodes.worker_environment import worker_settings
from xscale_launch.profile import Profile
from xscale_launch.supervise import Worker, start_worker

RANK = RankEnv(1, 2, 1, 2, "node", 29500)
WITH_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(autouse=True)
def _temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_env.tempfile, "gettempdir", lambda: str(tmp_path))


def test_workers_with_gpus_get_settings_of_torch_and_nccl(tmp_path: Path) -> None:
    added = worker_settings(WITH_GPUS, RANK, Path("run/logs"))
    caches = tmp_path / f"xscale-{os.getuid()}"
    assert added["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert added["TORCH_GLOO_LAZY_INIT"] == "1"
    assert added["TORCH_FR_DUMP_TEMP_FILE"] == "run/logs/nccl-trace-rank-"
    assert added["TRITON_CACHE_DIR"] == str(caches / "triton")
    assert caches.stat().st_mode & 0o777 == 0o700


def test_what_the_user_set_stays() -> None:
    set_by_user = {**WITH_GPUS, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TORCH_GLOO_LAZY_INIT": "0"}
    added = worker_settings(set_by_user, RANK, Path("run/logs"))
    assert not {"PYTORCH_ALLOC_CONF", "TORCH_GLOO_LAZY_INIT"} & added.keys()


def test_without_gpus_nothing_is_added() -> None:
    added = worker_settings({"CUDA_VISIBLE_DEVICES": ""}, RANK, Path("run/logs"))
    assert not any(name.startswith(("PYTORCH_", "TORCH", "TRITON_")) for name in added)


def test_a_folder_that_others_may_write_to_is_no_cache(tmp_path: Path) -> None:
    folder = tmp_path / f"xscale-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert gpu_env.node_local_caches() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert gpu_env.node_local_caches() is None


def test_a_worker_runs_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    for address, cpus in (("0000:1b:00.0", f"{first},9000-9003"), ("0000:ca:00.0", f"{last}-{last}")):
        (tmp_path / "gpus" / address).mkdir(parents=True)
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "local_cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(gpu_env, "GPUS", tmp_path / "gpus")
    monkeypatch.setattr(gpu_env, "PCI_DEVICES", tmp_path / "pci")
    assert gpu_env.cpus_near_gpu({}, 0) == {first}
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "1,0"}, 0) == {last}
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "1"}, 5) == {last}, "srun --gpus-per-task=1"
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "GPU-8f3a"}, 0) == frozenset()
    assert gpu_env.cpus_near_gpu({}, 2) == frozenset()
    # A job's cgroup lets it open the second GPU only, which it sees as number 0.
    for minor, address in enumerate(("0000:1b:00.0", "0000:ca:00.0")):
        lines = f"Model: \t H100\nGPU UUID: \t GPU-{minor}f3a\nDevice Minor: \t {minor}\n"
        (tmp_path / "gpus" / address / "information").write_text(lines)
    monkeypatch.setattr(gpu_env, "DEVICE_FILES", tmp_path)
    (tmp_path / "nvidia1").touch()
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "0"}, 3) == {last}
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, 3) == {last}
    assert gpu_env.cpus_near_gpu({"CUDA_VISIBLE_DEVICES": "GPU-0f"}, 3) == frozenset()
    program = "import os, resource; print(sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE))"
    log = tmp_path / "log"
    worker = Worker(1, (sys.executable, "-c", program), dict(os.environ), log, frozenset({last}))
    assert start_worker(worker).wait() == 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert log.read_text().strip() == f"[{last}] ({most}, {most})"


def test_mpi_passes_them_on() -> None:
    names = ("PYTORCH_ALLOC_CONF", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_DEVICE_ORDER", "HOME")
    passed = forwarded_variables(dict.fromkeys(names, "x"), Profile())
    assert passed == sorted(names[:-1])
