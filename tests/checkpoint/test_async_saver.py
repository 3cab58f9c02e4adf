"""Saving in the background: what is saved is what was there at the step, saves never cross, none is lost."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed import Pool
from xscale.checkpoint.async_saver import AsyncSaver, Staging
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import CheckpointError
from xscale.checkpoint.files import visible_steps
from xscale.checkpoint.load import load, load_tensors, read_state


class Gate(Disk):
    """Lets nothing be written until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.refuse = False

    def touch(self, what: str, path: Path) -> None:
        if what == "open":
            assert self.opened.wait(60)
            if self.refuse:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_the_numbers_are_those_of_the_step(tmp_path: Path) -> None:
    gate = Gate()
    tensors = {"a": torch.full((3, 4), 1.0), "b": torch.tensor(1)}
    state = {"consumed": 1}
    with AsyncSaver(tmp_path, disk=gate) as saver:
        started = saver.save(1, tensors, state, {})
        for tensor in tensors.values():
            tensor.fill_(2)
        state["consumed"] = 2
        assert not started.skipped
        assert saver.finished() == []
        assert visible_steps(tmp_path) == []
        gate.opened.set()
        path = saver.close()
        assert path == tmp_path / "step-00000001"
        assert [(one.step, one.path, one.error) for one in saver.finished()] == [(1, path, None)]
        assert saver.finished() == []
        saver.save(2, tensors, state, {})
    assert (load_tensors(path)["a"] == 1).all()
    assert load_tensors(path)["b"] == 1
    assert read_state(path) == {"consumed": 1}
    assert (load_tensors(tmp_path / "step-00000002")["a"] == 2).all()


def test_a_promise_not_to_change_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = Staging.copy

    def take(self: Staging, *arguments: Any) -> Any:
        assert go.wait(60)
        return real(self, *arguments)

    monkeypatch.setattr(Staging, "copy", take)
    tensors = {"a": torch.ones(5)}
    with AsyncSaver(tmp_path) as saver:
        assert saver.wait_copied() < 1, "nothing to wait for yet"
        saver.save(1, tensors, {}, {}, copy_in_background=True)
        wait = saver._copy_done.wait

        def release_and_wait() -> bool:
            go.set()
            return wait(60)

        # Nothing is copied before somebody waits for it.
        monkeypatch.setattr(saver._copy_done, "wait", release_and_wait)
        saver.wait_copied()
        tensors["a"].fill_(2)
    assert (load_tensors(tmp_path / "step-00000001")["a"] == 1).all()


def test_a_fault_while_copying_lets_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Staging, *arguments: Any) -> Any:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(Staging, "copy", take)
    saver = AsyncSaver(tmp_path)
    saver.save(1, {"a": torch.ones(5)}, {}, {}, copy_in_background=True)
    saver.wait_copied()
    with pytest.raises(MemoryError, match="no room"):
        saver.wait()


def test_another_outline_is_planned_again(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, {"a": torch.ones(3)}, {}, {})
        saver.save(2, {"a": torch.ones(4), "b": torch.ones(1, dtype=torch.int32)}, {}, {})
    assert load_tensors(tmp_path / "step-00000002")["a"].shape == (4,)


def test_the_next_save_waits_or_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with AsyncSaver(tmp_path / "skip", when_busy="skip", disk=gate) as saver:
        assert not saver.save(1, {"a": torch.zeros(2)}, {}, {}).skipped
        assert saver.save(2, {"a": torch.zeros(2)}, {}, {}).skipped
        threading.Timer(0.2, gate.opened.set).start()
        assert not saver.save(3, {"a": torch.zeros(2)}, {}, {}, required=True).skipped
    assert [step for step, _ in visible_steps(tmp_path / "skip")] == [3, 1]
    gate = Gate()
    with AsyncSaver(tmp_path / "wait", disk=gate) as saver:
        saver.save(1, {"a": torch.zeros(2)}, {}, {})
        join = AsyncSaver._join

        def release_and_join(self: AsyncSaver, seconds: float | None) -> None:
            gate.opened.set()
            join(self, seconds)

        # The first is not written before somebody waits for it.
        monkeypatch.setattr(AsyncSaver, "_join", release_and_join)
        assert not saver.save(2, {"a": torch.zeros(2)}, {}, {}).skipped
    assert [step for step, _ in visible_steps(tmp_path / "wait")] == [2, 1]


def test_failures_are_told_up_to_a_limit(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    saver = AsyncSaver(tmp_path, disk=gate, failure_limit=1)
    gate.refuse = True
    saver.save(1, {"a": torch.zeros(2)}, {}, {})
    saver.wait()
    assert [one.error is None for one in saver.finished()] == [False]
    gate.refuse = False
    saver.save(2, {"a": torch.zeros(2)}, {}, {})
    saver.wait()
    gate.refuse = True
    saver.save(3, {"a": torch.zeros(2)}, {}, {})
    saver.save(4, {"a": torch.zeros(2)}, {}, {})
    with pytest.raises(CheckpointError, match="step-00000004: the checkpoint cannot be written: No space left"):
        saver.save(5, {"a": torch.zeros(2)}, {}, {})
    saver = AsyncSaver(tmp_path, disk=gate, failure_limit=9)
    saver.save(6, {"a": torch.zeros(2)}, {}, {})
    with pytest.raises(CheckpointError, match="step-00000006"):
        saver.close()
    assert [step for step, _ in visible_steps(tmp_path)] == [2]


def test_a_failing_run_prints_its_traceback_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, printed = Gate(), list[str]()
    real = AsyncSaver._join

    def join(self: AsyncSaver, seconds: float | None) -> None:
        printed.append(capsys.readouterr().err)
        gate.opened.set()
        real(self, seconds)

    saver = AsyncSaver(tmp_path, disk=gate)
    saver.save(1, {"a": torch.zeros(2)}, {}, {})
    monkeypatch.setattr(AsyncSaver, "_join", join)
    with pytest.raises(RuntimeError, match="out of memory"), saver:
        raise RuntimeError("out of memory")
    assert len(printed) == 1
    assert "RuntimeError: out of memory" in printed[0]


def test_a_fault_of_ours_is_raised_where_the_run_can_see_it(tmp_path: Path) -> None:
    class Broken(Disk):
        def touch(self, what: str, path: Path) -> None:
            raise AssertionError("ours")

    saver = AsyncSaver(tmp_path, disk=Broken(), failure_limit=9)
    saver.save(1, {"a": torch.zeros(2)}, {}, {})
    with pytest.raises(AssertionError, match="ours"):
        saver.wait()


def beside_training(folder: Path) -> None:
    """Messages of the saves and of the training go on at the same time and never meet."""
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = distribute_tensor(torch.zeros(6, 5), mesh, [Shard(0)])
    plain = torch.zeros(300)
    total = torch.zeros(1)
    with AsyncSaver(folder, group=group, when_busy="wait", keep_last=3) as saver:
        for step in range(1, 8):
            for _ in range(5):
                one = torch.ones(1)
                dist.all_reduce(one)
                total += one
            value.to_local().fill_(step)
            plain.fill_(step)
            saver.save(step, {"value": value, "plain": plain}, {"step": step}, {})
    assert total == 7 * 5 * dist.get_world_size()
    dist.barrier()
    assert [step for step, _ in visible_steps(folder)] == [7, 6, 5]
    for step, path in visible_steps(folder):
        load(path, {"value": value, "plain": plain})
        assert (value.full_tensor() == step).all()
        assert (plain == step).all()


def test_beside_training(pool: Pool, tmp_path: Path) -> None:
    pool.run(beside_training, 3, tmp_path)


def skipping(folder: Path) -> list[int]:
    """A rank whose part takes long: all leave out the same saves."""

    class Slow(Disk):
        def touch(self, what: str, path: Path) -> None:
            if what == "write" and dist.get_rank() == 1:
                threading.Event().wait(0.05)

    def over_a_group_of_its_own(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        assert group is not None, "the default group is NCCL's beside a GPU, and takes tensors"
        gather(values, value, group=group)

    group, gather = dist.new_group(backend="gloo"), dist.all_gather_object
    with pytest.MonkeyPatch.context() as patch, AsyncSaver(folder, group=group, when_busy="skip", disk=Slow()) as saver:
        patch.setattr(dist, "all_gather_object", over_a_group_of_its_own)
        return [step for step in range(1, 30) if not saver.save(step, {"a": torch.ones(20)}, {}, {}).skipped]


def test_all_ranks_leave_out_the_same_saves(pool: Pool, tmp_path: Path) -> None:
    taken = pool.run(skipping, 2, tmp_path)
    assert taken[0] == taken[1]
    assert 1 <= len(taken[0]) < 29
    assert [step for step, _ in visible_steps(tmp_path)] == taken[0][::-1]


@pytest.mark.gpu
def test_from_a_gpu_the_copies_keep_their_order(tmp_path: Path) -> None:
    value = torch.full((1 << 24,), 1.0, device="cuda")
    with AsyncSaver(tmp_path) as saver:
        for step in range(1, 4):
            value.fill_(step)
            saver.save(step, {"a": value}, {}, {}, copy_in_background=step == 2)
            value.fill_(-1)
    for step in range(1, 4):
        assert (load_tensors(tmp_path / f"step-{step:08d}")["a"] == step).all()
