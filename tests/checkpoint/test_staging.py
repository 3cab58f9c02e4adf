"""Staging of saves: one block as large as the state, copies on a queue of their own, and an update that waits for them.

The queue and the page-locking of a GPU have stand-ins that record what they are told.
"""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.load import load_tensors
from xscale.checkpoint.staging import ALIGNMENT, Staging


class Queue:
    """A device's queue: copies are made when something waits for them, as late as a GPU may make them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.queued: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        self.told.append("begin")

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.told.append("copy")
        self.queued.append((target, source))

    def hold_update(self) -> None:
        self.told.append("hold")
        self._run()

    def wait(self) -> None:
        self.told.append("wait")
        self._run()

    def _run(self) -> None:
        for target, source in self.queued:
            target.copy_(source)
        self.queued.clear()


def state() -> dict[str, Tensor]:
    """Boxes of which torch's pinned allocator would make 1.4 times as much, and small ones of odd sizes."""
    return {
        "weight": torch.randn(1500, 300),
        "momentum": torch.randn(1500, 300, dtype=torch.float64),
        "half": torch.randn(7, 11).bfloat16(),
        "step": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def saver(folder: Path, staging: Staging) -> AsyncSaver:
    made = AsyncSaver(folder)
    made._staging = staging
    return made


def test_the_block_is_as_large_as_the_state(tmp_path: Path) -> None:
    pinned: list[int] = []
    tensors = state()
    bytes_of_state = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    staging = Staging(lambda device: Queue(), lambda memory: pinned.append(memory.numel()))
    with saver(tmp_path, staging) as saves:
        saves.prepare(tensors)
        for step in (1, 2):
            saves.save(step, tensors, {}, {})
            saves.wait()
    assert len(pinned) == 1, "the memory is locked once"
    assert bytes_of_state <= pinned[0] <= bytes_of_state + len(tensors) * ALIGNMENT
    for name, value in load_tensors(tmp_path / "step-00000002").items():
        assert torch.equal(value, tensors[name])


def test_copies_come_behind_the_step_and_before_the_update(tmp_path: Path) -> None:
    queue, tensors = Queue(), state()
    with saver(tmp_path, Staging(lambda device: queue, lambda memory: None)) as saves:
        # As on a GPU: the thread that writes comes late.
        gate = threading.Event()
        wait = saves._staging.wait
        saves._staging.wait = lambda: (gate.wait(60), wait())  # type: ignore[method-assign, func-returns-value]
        saves.save(1, tensors, {}, {})
        assert queue.told == ["begin", *["copy"] * len(tensors)]
        saves.wait_copied()
        assert queue.told[-1] == "hold"
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        gate.set()
    assert queue.told[-1] == "wait"
    for name, value in load_tensors(tmp_path / "step-00000001").items():
        assert torch.equal(value, before[name])


def test_memory_is_locked_while_training_goes_on(tmp_path: Path) -> None:
    locked = threading.Event()
    staging = Staging(lambda device: Queue(), lambda memory: locked.wait(60))
    with saver(tmp_path, staging) as saves:
        saves.prepare(state())
        locked.set()
        saves.save(1, state(), {}, {})
    assert (tmp_path / "step-00000001").is_dir()


def test_memory_that_cannot_be_locked_is_said_and_used(tmp_path: Path) -> None:
    def refuse(memory: Tensor) -> None:
        raise RuntimeError("out of memory")

    tensors = state()
    said = pytest.warns(UserWarning, match=r"could not be page-locked \(out of memory\)")
    with saver(tmp_path, Staging(lambda device: Queue(), refuse)) as saves, said:
        saves.save(1, tensors, {}, {})
    assert torch.equal(load_tensors(tmp_path / "step-00000001")["weight"], tensors["weight"])


def test_other_tensors_get_other_memory_and_a_cpu_locks_none(tmp_path: Path) -> None:
    with saver(tmp_path, Staging(pin=lambda memory: pytest.fail("there is no GPU"))) as saves:
        saves.save(1, {"a": torch.ones(3)}, {}, {})
        saves.save(2, {"a": torch.ones(4), "b": torch.ones(1, dtype=torch.int32)}, {}, {})
    assert load_tensors(tmp_path / "step-00000002")["a"].shape == (4,)
