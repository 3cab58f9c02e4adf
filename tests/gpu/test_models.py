"""Every part on a GPU: outputs and gradients in float32 are the CPU's, compiled too, and in bfloat16 its rounding."""

from typing import Any

import pytest
import torch

from tests.families import each, example
from tests.gpu.parts_on_device import PartOnDevice, build, relative_difference, subjects
from xscale.conformance.optimizer import gradients, weights
from xscale.core.registry import Entry
from xscale.optim.optimizer.optimizer import OPTIMIZERS, LocalParameter

pytestmark = pytest.mark.gpu
FLOAT32, BFLOAT16 = 1e-4, 0.1
"""Largest relative differences of a tensor's norm; a core that chooses keys may choose others in bfloat16."""
SUBJECTS = [pytest.param(name, entry, id=f"{name}-{entry.name}") for name, entry in subjects()]
COMPILED = ("core", "mixer", "router", "norm", "position")
"""Families that are compiled in training, as blocks or parts of them."""


def check(part: PartOnDevice, expected: PartOnDevice, tolerance: float, *, compiled: bool = False) -> None:
    """Compare outputs and every gradient."""
    out, found = part.loss_and_gradients(compiled)
    wanted, wanted_gradients = expected.loss_and_gradients()
    assert out.isfinite().all()
    assert relative_difference(out, wanted) <= tolerance, "output"
    assert found.keys() == wanted_gradients.keys()
    scale = max((g.norm() for g in wanted_gradients.values()), default=torch.tensor(1.0))
    for name, gradient in found.items():
        # A gradient that cancels to nothing is rounding on either side.
        if wanted_gradients[name].norm() > 1e-6 * scale:
            assert relative_difference(gradient, wanted_gradients[name]) <= tolerance, name


@pytest.mark.parametrize(("name", "entry"), SUBJECTS)
def test_float32_is_the_cpus(name: str, entry: Entry[Any], device: torch.device) -> None:
    part = build(name, entry, device, torch.float32)
    check(part, build(name, entry, torch.device("cpu"), torch.float32), FLOAT32)


@pytest.mark.parametrize(("name", "entry"), [one for one in SUBJECTS if one.values[0] in COMPILED])
def test_compiled_float32_is_the_cpus(name: str, entry: Entry[Any], device: torch.device) -> None:
    part = build(name, entry, device, torch.float32)
    check(part, build(name, entry, torch.device("cpu"), torch.float32), FLOAT32, compiled=True)


@pytest.mark.parametrize(("name", "entry"), SUBJECTS)
def test_bfloat16_is_its_rounding(name: str, entry: Entry[Any], device: torch.device) -> None:
    """The output is finite, and near float32's unless rounding changes what is chosen; so are gradients."""
    out, found = build(name, entry, device, torch.bfloat16).loss_and_gradients()
    wanted, _ = build(name, entry, torch.device("cpu"), torch.bfloat16).loss_and_gradients()
    exact, _ = build(name, entry, torch.device("cpu"), torch.float32).loss_and_gradients()
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in found.values())
    # As far from float32 as the CPU's bfloat16 is, where rounding decides a choice.
    limit = max(BFLOAT16, 3 * relative_difference(wanted, exact))
    assert relative_difference(out, exact) <= limit


@each(OPTIMIZERS)
def test_an_optimizers_steps_are_the_cpus(entry: Entry[Any], device: torch.device) -> None:
    def stepped(on: torch.device) -> list[torch.Tensor]:
        over = [
            LocalParameter(one.name, one.value.float().to(on), one.decays, linear_map=one.linear_map)
            for one in weights()
        ]
        optimizer = entry.part(example(entry), over)
        for step in range(3):
            optimizer.step([gradient.float().to(on) for gradient in gradients(step)], 1e-2)
        return [one.value.double().cpu() for one in over]

    for value, wanted, start in zip(stepped(device), stepped(torch.device("cpu")), weights(), strict=True):
        moved = relative_difference(value - start.value, wanted - start.value)
        assert moved <= 1e-3, f"{start.name}: the updates differ by {moved:.1e}"
