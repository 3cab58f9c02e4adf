"""A state kept in memory: newer than the disk or of no use, whole or not there, from the next machine if need be."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed import Pool
from tests.train.tiny import recipe, run
from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.errors import CheckpointError, consensus
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.core.errors import ConfigError
from xscale.mesh.consensus import Consensus
from xscale.run.run_folder import run_name


def spread(step: int, dim: int = 0) -> dict[str, torch.Tensor]:
    """A tensor that is cut, one that every rank has, one of an odd size and another number format."""
    draw = torch.Generator().manual_seed(step)
    whole = torch.randn(6, 4, generator=draw)
    if dist.is_initialized() and dist.get_world_size() > 1:
        whole = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])
    odd = torch.randn(7, generator=draw, dtype=torch.float64)
    return {"cut": whole, "whole": torch.full((3, 2), float(step)), "odd": odd}


def same(held: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(_local(held[name]), _local(one)) for name, one in spread(step).items())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def memory(folder: Path, machines: bool = False) -> InMemoryCheckpoint:
    """Saves in memory; with `machines` each rank is on one of its own."""
    ranks = consensus(None, "kept")
    return InMemoryCheckpoint(
        folder / f"machine-{ranks.rank if machines else 0}", ranks, 1 if machines else ranks.world
    )


def keep(one: InMemoryCheckpoint, step: int) -> None:
    tensors = spread(step)
    one.copy(tensors)
    one.commit(step, tensors, {"step": step})


def two(folder: Path) -> None:
    one = memory(folder)
    for step in (1, 2, 3):
        keep(one, step)
    held = spread(0)
    assert memory(folder).restore(held, 3) == (None, []), "the disk has as much"
    kept, said = memory(folder).restore(held, 2)
    assert kept is not None
    assert (kept.step, kept.state, said) == (3, {"step": 3}, [])
    assert same(held, 3)
    # Killed between the copy and what makes it count: the one before is there, whole.
    again = memory(folder)
    again.restore(spread(0), 2)
    again.copy(spread(4))
    held = spread(0)
    kept, _ = memory(folder).restore(held, -1)
    assert kept is not None
    assert kept.step == 3
    assert same(held, 3)
    kept, said = memory(folder).restore(spread(0, dim=1), -1)
    assert kept is None
    assert "the in-memory checkpoint of step 3 is incomplete or of another layout" in said[0]


@pytest.mark.long
def test_newest_whole_and_of_this_layout(pool: Pool, tmp_path: Path) -> None:
    pool.run(two, 2, tmp_path)
    # One rank finds the parts of two.
    kept, said = memory(tmp_path).restore(spread(0), -1)
    assert kept is None
    assert "is incomplete or of another layout" in said[0]


def changed(folder: Path) -> str:
    keep(memory(folder), 1)
    dist.barrier()
    if dist.get_rank() == 1:
        file = folder / "machine-0" / "rank-00001.0.bytes"
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
    dist.barrier()
    held = spread(0)
    kept, said = memory(folder).restore(held, -1)
    assert kept is None
    assert same(held, 0), "never a partial load"
    return said[0]


@pytest.mark.long
def test_a_changed_byte_is_seen_by_all(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(changed, 2, tmp_path)
    assert said[0] == said[1]
    assert "the in-memory shards of rank 1 are damaged (their hash differs)" in said[0]


def machines(folder: Path, lost: int) -> None:
    one = memory(folder, machines=True)
    for step in (1, 2):
        keep(one, step)
    dist.barrier()
    if dist.get_rank() == lost:
        shutil.rmtree(one.folder)
    dist.barrier()
    held, other = spread(0), memory(folder, machines=True)
    kept, said = other.restore(held, -1)
    assert kept is not None, said
    assert kept.step == 2
    assert same(held, 2)
    keep(other, 3)
    assert memory(folder, machines=True).restore(held, 2)[0] is not None


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 2])
def test_the_next_machine_has_it_too(pool: Pool, tmp_path: Path, lost: int) -> None:
    pool.run(machines, 3, tmp_path, lost)


def test_without_the_next_machine_it_is_gone(pool: Pool, tmp_path: Path) -> None:
    """The control: were nothing given away, the loss of a machine would be final."""
    pool.run(two_lost, 3, tmp_path)


def two_lost(folder: Path) -> None:
    keep(memory(folder, machines=True), 1)
    dist.barrier()
    if dist.get_rank() in (0, 1):
        shutil.rmtree(folder / f"machine-{dist.get_rank()}")
    dist.barrier()
    assert memory(folder, machines=True).restore(spread(0), -1)[0] is None


def test_a_file_system_in_memory_that_is_full(tmp_path: Path) -> None:
    """The save fails with a sentence, not the process with a signal, and what was kept before still counts."""
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system needs the right to mount: {done.stderr.strip()}")
    try:
        one, large = InMemoryCheckpoint(small / "run", consensus(), 1), {"a": torch.ones(200_000)}
        saver = AsyncSaver(tmp_path / "checkpoints", failure_limit=0)
        saver.save_in_memory(one, 1, large, {"step": 1})
        saver.wait()
        saver.save_in_memory(one, 2, large, {"step": 2})
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
            saver.wait()
        kept, _ = InMemoryCheckpoint(small / "run", consensus(), 1).restore({"a": torch.zeros(200_000)}, -1)
        assert kept is not None
        assert kept.step == 1
        one.clear()
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    kept = {"memory_every_steps": 1, "memory_folder": str(tmp_path / "nowhere")}
    with pytest.raises(
        ConfigError, match=r"checkpoint.memory_folder: the folder \S+/nowhere does not exist on some machine"
    ):
        run(recipe(tmp_path, "run", checkpoint=kept))


def test_what_another_version_left_is_not_there(tmp_path: Path) -> None:
    """A restart after an update goes on from the disk, and does not fall over what lies in memory."""
    one, held = InMemoryCheckpoint(tmp_path / "run", consensus(), 1), {"a": torch.ones(3)}
    one.copy(held)
    one.commit(5, held, {})
    (head,) = (tmp_path / "run").glob("*.json")
    for other in (head.read_text().replace('"hash"', '"sha256"'), "{", ""):
        head.write_text(other)
        assert InMemoryCheckpoint(tmp_path / "run", consensus(), 1).restore({"a": torch.zeros(3)}, -1) == (None, [])


def copied(folder: Path) -> InMemoryCheckpoint:
    memory, tensors = InMemoryCheckpoint(folder, consensus(), 1), {"a": torch.ones(3)}
    memory.copy(tensors)
    memory.commit(5, tensors, {"step": 5})
    return memory


def test_a_file_that_is_a_link_overwrites_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "rank-00000.0.bytes").symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        copied(tmp_path / "run")
    assert other.read_text() == "precious"


def test_a_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    """Neither written to, nor read, nor removed with what it points to."""
    copied(tmp_path / "other")
    held = sorted((tmp_path / "other").iterdir())
    (tmp_path / "run").symlink_to(tmp_path / "other")
    memory = InMemoryCheckpoint(tmp_path / "run", consensus(), 1)
    assert memory.restore({"a": torch.zeros(3)}, -1) == (None, [])
    with pytest.raises(OSError, match="symbolic link"):
        copied(tmp_path / "run")
    memory.clear()
    assert sorted((tmp_path / "other").iterdir()) == held


@pytest.mark.parametrize("whose", ["another user's", "writable by all"])
def test_a_folder_of_others_is_not_used(tmp_path: Path, whose: str) -> None:
    copied(tmp_path / "run")
    if whose == "writable by all":
        (tmp_path / "run").chmod(0o777)
    elif os.getuid():
        pytest.skip("only root may give a folder to another user")
    else:
        os.chown(tmp_path / "run", 12345, 12345)
    memory = InMemoryCheckpoint(tmp_path / "run", consensus(), 1)
    assert memory.restore({"a": torch.zeros(3)}, -1) == (None, [])
    with pytest.raises(OSError, match=r"another user|others may write"):
        copied(tmp_path / "run")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "name").write_text("hostile")
    (tmp_path / f"xscale-{os.getuid()}-hostile").mkdir(mode=0o777)
    (tmp_path / f"xscale-{os.getuid()}-hostile").chmod(0o777)
    config = {"memory_every_steps": 1, "memory_folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"checkpoint.memory_folder: .*others may write into the folder"):
        run(recipe(tmp_path, "again", checkpoint=config))


def test_copies_are_for_this_user_alone(tmp_path: Path) -> None:
    """Weights and optimizer states lie in memory that all users of a machine share."""
    umask = os.umask(0)
    try:
        copied(tmp_path / "run")
    finally:
        os.umask(umask)
    (content,) = (tmp_path / "run").glob("*.bytes")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert content.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../../other", "/tmp/other", "..", "", "a/b", "a\n", "x" * 300])
def test_the_name_of_a_run_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    """It becomes that of a folder that is removed at the end of the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "name").write_text(name)
    with pytest.raises(ConfigError, match="run/name: the file does not hold the name of a run"):
        run_name(tmp_path / "run")


@pytest.mark.parametrize("field", ["owner", "step", "world", "size", "hash", "outline", "state"])
@pytest.mark.parametrize("value", [None, -1, 10**30, "x", [[]], True])
def test_a_header_of_other_types_is_not_there(tmp_path: Path, field: str, value: object) -> None:
    copied(tmp_path / "run")
    (head,) = (tmp_path / "run").glob("*.json")
    head.write_text(json.dumps({**json.loads(head.read_text()), field: value}))
    kept, messages = InMemoryCheckpoint(tmp_path / "run", consensus(), 1).restore({"a": torch.zeros(3)}, -1)
    assert kept is None
    assert messages or (field, value) not in (("hash", "x"), ("outline", "x"))


@pytest.mark.parametrize("step", [5, 99])
def test_a_header_and_its_state_are_of_one_step(tmp_path: Path, step: int) -> None:
    copied(tmp_path / "run")
    (head,) = (tmp_path / "run").glob("*.json")
    head.write_text(json.dumps({**json.loads(head.read_text()), "state": {"step": step}}))
    kept, _ = InMemoryCheckpoint(tmp_path / "run", consensus(), 1).restore({"a": torch.zeros(3)}, -1)
    assert (kept is None) == (step == 99)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_copies_from_a_gpu_are_queued_into_locked_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is locked once, and the copies are waited for before they are hashed."""
    calls: list[str] = []
    event = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    stream = SimpleNamespace(record_event=lambda: event)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append("lock") or 0,
        cudaHostUnregister=lambda address: calls.append("unlock"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    memory = InMemoryCheckpoint(tmp_path / "memory", Consensus(), 1)
    tensors = {"a": torch.arange(6.0).as_subclass(OnGpu)}
    for step in range(1, 5):
        memory.copy(tensors)
        memory.commit(step, tensors, {"step": step})
    assert calls == ["lock", "wait", "lock", "wait", "wait", "wait"], "two slots in turn"
    restored = {"a": torch.zeros(6)}
    state, _ = InMemoryCheckpoint(tmp_path / "memory", Consensus(), 1).restore(restored, 0)
    assert state is not None
    assert (state.step, restored["a"].tolist()) == (4, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    memory.clear()
    assert calls[-2:] == ["unlock", "unlock"]


def test_a_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    """Whoever may write into the folder of a link's target would say what a run resumes from."""
    copied(tmp_path / "run")
    (file,) = (tmp_path / "run").glob("*.bytes")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert InMemoryCheckpoint(tmp_path / "run", consensus(), 1).restore({"a": torch.zeros(3)}, -1)[0] is None
    file.unlink()
    (tmp_path / "elsewhere").rename(file)
    assert InMemoryCheckpoint(tmp_path / "run", consensus(), 1).restore({"a": torch.zeros(3)}, -1)[0] is not None
