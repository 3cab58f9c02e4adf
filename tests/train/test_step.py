"""Phases of a step are timed without a wait for the device, and each process takes the GPU that is its own."""

import pytest
import torch

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.mesh.environment import RankInfo
from xscale.run.parts import device_of
from xscale.settings.settings import Settings
from xscale.step.phase_timer import PhaseTimer


class DeviceClock:
    """A GPU's clock and queue: an event is reached when the device has come so far."""

    def __init__(self) -> None:
        self.queued, self.done = 0.0, 0.0

    def make_event(self, *, enable_timing: bool) -> "DeviceEvent":
        assert enable_timing
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, clock: DeviceClock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = self.clock.queued

    def query(self) -> bool:
        return self.at <= self.clock.done

    def elapsed_time(self, other: "DeviceEvent") -> float:
        return (other.at - self.at) * 1e3


def test_on_a_gpu_phases_are_timed_by_events_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock()
    monkeypatch.setattr(torch.cuda, "Event", clock.make_event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a wait for the device"))
    timer = PhaseTimer(torch.device("cuda"))
    for name, seconds in (("forward", 2.0), ("backward", 4.0), ("forward", 1.0), ("optimizer", 3.0)):
        with timer.phase(name):
            clock.queued += seconds
    assert timer.flush() == {}
    clock.done = 7.0
    assert timer.flush() == {"forward": 3.0, "backward": 4.0}
    clock.done = 10.0
    assert timer.flush() == {"optimizer": 3.0}


def test_on_a_cpu_phases_add_up() -> None:
    timer, begun = PhaseTimer(torch.device("cpu")), []
    timer.on_phase = begun.append
    for name in ("forward", "backward", "forward"):
        with timer.phase(name):
            pass
    assert begun == ["forward", "backward", "forward"]
    split = timer.flush()
    assert list(split) == ["forward", "backward"]
    assert all(seconds >= 0 for seconds in split.values())
    assert timer.flush() == {}


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(4, 3, 3), (8, 2, 2), (1, 3, 0)])
def test_a_process_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    """Each of several processes sees one GPU, its own, as srun --gpus-per-task=1 binds them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    settings = decode(Settings, {"run": {"device": "cuda"}})
    assert device_of(settings, RankInfo(local_rank, 4, local_rank, 4)) == torch.device("cuda", index)


def test_fewer_gpus_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = decode(Settings, {"run": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"4 processes run on this machine, and 2 GPUs are visible\. Start as many"):
        device_of(settings, RankInfo(0, 4, 0, 4))
