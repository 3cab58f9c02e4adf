"""Muon against torch.optim.Muon, and its iterations against a literal reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import drawn
from xscale.optim.groups import ParameterGroup
from xscale.optim.optimizer.muon import Muon, NewtonSchulz
from xscale.optim.optimizer.optimizer import LocalParameter

STEPS = 20
SHAPES = ((12, 8), (8, 12), (9, 9))


def gradient(step: int, at: int, shape: tuple[int, ...]) -> Tensor:
    return drawn(*shape, seed=1000 * step + at)


def steps_of_torch(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
    for step in range(STEPS):
        for at, weight in enumerate(weights):
            weight.grad = gradient(step, at, tuple(weight.shape))
        optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_are_those_of_torch(adjust: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's iterations have one number format.
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    # torch 2.15 casts by `to`.
    to = Tensor.to
    monkeypatch.setattr(
        Tensor,
        "to",
        lambda tensor, *args, **named: (
            tensor.clone() if named.get("dtype") == torch.bfloat16 else to(tensor, *args, **named)
        ),
    )
    over = [LocalParameter(f"w{at}", drawn(*shape, seed=at), True, linear_map=True) for at, shape in enumerate(SHAPES)]
    theirs = [weight.value.clone().requires_grad_() for weight in over]
    shared: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    ours = Muon(Muon.Config(ns_dtype="float64", adjust_lr_fn=adjust, **shared), over)
    for step in range(STEPS):
        ours.step([gradient(step, at, shape) for at, shape in enumerate(SHAPES)], 0.02)
    steps_of_torch(torch.optim.Muon(theirs, adjust_lr_fn=adjust, **shared), theirs)
    for weight, expected in zip(over, theirs, strict=True):
        assert (weight.value - expected).abs().max() < 1e-12
    for shape, weight in zip(SHAPES, over, strict=True):
        assert (weight.value - drawn(*shape, seed=SHAPES.index(shape))).abs().max() > 0.01


def test_in_bfloat16_too() -> None:
    over = [LocalParameter(f"w{at}", drawn(*shape, seed=at), True, linear_map=True) for at, shape in enumerate(SHAPES)]
    theirs = [weight.value.clone().requires_grad_() for weight in over]
    ours = Muon(Muon.Config(lr=0.02, adjust_lr_fn="original"), over)
    for step in range(STEPS):
        ours.step([gradient(step, at, shape) for at, shape in enumerate(SHAPES)], 0.02)
    steps_of_torch(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1), theirs)
    for weight, expected in zip(over, theirs, strict=True):
        # A few units of bfloat16, which differ with the order of sums, in each of 20 steps of 0.02.
        assert (weight.value - expected).abs().max() < STEPS * 0.02 * 2**-7


def test_an_expert_is_updated_as_a_matrix_of_its_own() -> None:
    stack = drawn(3, 12, 8, seed=1)
    config = Muon.Config(ns_dtype="float64")
    stacked = Muon(config, [LocalParameter("experts", stack.clone(), True, linear_map=True)])
    single = [Muon(config, [LocalParameter("w", matrix.clone(), True, linear_map=True)]) for matrix in stack]
    for step in range(STEPS):
        stacked.step([gradient(step, 0, (3, 12, 8))], 0.02)
        for at, optimizer in enumerate(single):
            optimizer.step([gradient(step, 0, (3, 12, 8))[at]], 0.02)
    for at, optimizer in enumerate(single):
        assert torch.allclose(stacked.weights[0].value[at], optimizer.weights[0].value, rtol=1e-12, atol=1e-13)


def test_the_rest_takes_adamw_with_its_own_rate() -> None:
    table = drawn(10, 6, seed=2)
    over = [LocalParameter("table", table.clone(), True), LocalParameter("gain", drawn(6, seed=3), False)]
    theirs = [weight.value.clone().requires_grad_() for weight in over]
    ours = Muon(Muon.Config(lr=0.02, adamw_lr=0.003, weight_decay=0.1), over)
    for step in range(STEPS):
        ours.step([gradient(step, at, tuple(weight.value.shape)) for at, weight in enumerate(over)], 0.01)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    # The schedule is at half of the peak.
    steps_of_torch(torch.optim.AdamW(groups, lr=0.0015, betas=(0.9, 0.95)), theirs)
    for weight, expected in zip(over, theirs, strict=True):
        assert (weight.value - expected).abs().max() < 1e-10


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (4, 6, 9)])
def test_iterations_keep_the_singular_vectors_and_level_the_values(shape: tuple[int, ...]) -> None:
    """The polynomial acts on each singular value alone: X = U S V^T becomes U p(p(... S)) V^T (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.775, 2.0315
    matrices = drawn(*shape, seed=4)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag_embed(values) @ right
    result = NewtonSchulz(5, (a, b, c), 1e-7)(matrices)
    assert torch.allclose(result, expected, rtol=1e-9, atol=1e-10)
    assert float(torch.linalg.svdvals(result).min()) > 0.3
    assert float(torch.linalg.svdvals(result).max()) < 1.3
    other = NewtonSchulz(4, (a, b, c), 1e-7)(matrices)
    assert not torch.allclose(other, expected, rtol=1e-3, atol=1e-3)


def test_a_matched_update_has_the_size_of_adamws() -> None:
    """Liu et al. 2025, equation 4: a root mean square of 0.2 times the rate, whatever the shape."""
    for shape in ((64, 16), (32, 32), (16, 96)):
        weight = torch.zeros(shape, dtype=torch.float64)
        config = Muon.Config(ns_dtype="float64", weight_decay=0.0, ns_steps=15, ns_coefficients=(1.875, -1.25, 0.375))
        Muon(config, [LocalParameter("w", weight, True, linear_map=True)]).step([gradient(0, 0, shape)], 1.0)
        assert math.isclose(float(weight.square().mean().sqrt()), 0.2, rel_tol=1e-6)


def test_groups_freeze_what_adamw_updates_too() -> None:
    """A table is frozen for the first half of the run, and trained after it."""
    groups = (ParameterGroup(match="table", since=0.5),)
    table = LocalParameter("table", torch.ones(4, 4), decays=True)
    optimizer = Muon(Muon.Config(groups=groups), [table])
    for progress, moves in ((0.0, False), (0.5, True)):
        optimizer.set_progress(progress)
        before = table.value.clone()
        optimizer.step([torch.ones(4, 4)], 1e-2)
        assert torch.equal(table.value, before) != moves
