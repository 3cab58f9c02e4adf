"""FLOP/s of a GPU by dtype: float32 is TF32 only where the recipe allows it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale.core.errors import ConfigError
from xscale.measure.device import ASSUMED, DEVICES, GIVEN, peak_flops
from xscale.planning.plan import Hardware


@pytest.mark.parametrize("waiting", [0.0, 9.0])
def test_the_peak_of_a_cpu_is_that_of_an_idle_machine(monkeypatch: pytest.MonkeyPatch, waiting: float) -> None:
    """A matmul takes a second on each core, and `waiting` more for cores that other programs use."""
    passed = iter(range(1000))
    threads = torch.get_num_threads()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(passed)) * (1 + waiting))
    on_cores = iter(range(1000))
    monkeypatch.setattr("time.process_time", lambda: float(next(on_cores)) * threads)
    assert peak_flops(torch.device("cpu"), torch.float32) == pytest.approx(2 * 512**3)


@pytest.mark.parametrize(("precision", "factor"), [("highest", 15), ("high", 2)])
def test_the_peak_of_float32_follows_its_precision(
    monkeypatch: pytest.MonkeyPatch, precision: str, factor: int
) -> None:
    h100 = DEVICES["h100"]
    assert replace(h100, tf32=precision != "highest").flops_in(torch.float32) == h100.flops / factor
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert peak_flops(torch.device("cuda"), torch.float32) == h100.flops / factor
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == h100.flops
    assert peak_flops(torch.device("cuda"), torch.float64) == h100.flops / 15


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_plan_takes_the_precision_of_the_recipe(precision: str) -> None:
    settings: Any = SimpleNamespace(precision=SimpleNamespace(compute="float32", float32_matmul=precision))
    device = Hardware(device="h100").resolve(settings)
    assert device is not None
    assert device.tf32 == (precision == "high")


SETTINGS: Any = SimpleNamespace(precision=SimpleNamespace(compute="bfloat16", float32_matmul="highest"))
STATED = {"flops": 5e14, "memory": 9.6e10, "bandwidth": 4e12}


@pytest.mark.parametrize("absent", [*STATED, "all"])
def test_a_device_that_is_not_known_is_refused_with_those_that_are_and_how_to_state_it(absent: str) -> None:
    figures = {} if absent == "all" else {name: value for name, value in STATED.items() if name != absent}
    with pytest.raises(ConfigError) as refused:
        Hardware("v9", **figures).resolve(SETTINGS)
    (problem,) = refused.value.problems
    assert problem.what == "'v9' is not in the table of devices"
    for word in (*DEVICES, "cpu", "--flops", "--memory", "--bandwidth"):
        assert word in problem.fix


def test_a_device_that_is_stated_has_these_figures_and_says_which_are_assumed() -> None:
    device = Hardware("v9", **STATED, node=4).resolve(SETTINGS)
    assert device is not None
    assert {name: getattr(device, name) for name in STATED} == STATED
    assert (device.name, device.node, device.timed) == ("v9", 4, True)
    assert {device.sources[name] for name in (*STATED, "node")} == {GIVEN}
    assert all("assumed" in device.sources[name] for name in ("link", "network", *ASSUMED))


def test_the_figures_of_a_known_device_can_be_replaced() -> None:
    device = Hardware("h100", flops=1e15).resolve(SETTINGS)
    assert device is not None
    assert (device.flops, device.sources["flops"]) == (1e15, GIVEN)
    assert device.bandwidth == DEVICES["h100"].bandwidth
