"""Norms by statistics of a batch: torch's batch norm, and PowerNorm's two algorithms step by step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import drawn
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.module import name_modules
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.post_step import WeightWriter
from xscale.nn.tokens import Stats, Tokens

WIDTH, STEPS = 5, 4


def built(kind: str, **changes: Any) -> Norm:
    entry = NORMS.get(kind)
    norm: Norm = entry.part(entry.part.Config(**changes), WIDTH)
    name_modules(norm)
    materialize(norm, 0, dtype=torch.float64)
    with torch.no_grad():
        norm.get_parameter("weight").copy_(1 + drawn(WIDTH, seed=1))
        norm.get_parameter("bias").copy_(drawn(WIDTH, seed=2))
    return norm.train()


def batch(step: int, micro_batches: int = 1) -> list[Tensor]:
    """Micro-batches [2, 3, D] of a step, whose channels have means and deviations of their own."""
    x = drawn(2 * micro_batches, 3, WIDTH, seed=10 + step) * torch.arange(1, WIDTH + 1) + 0.5
    return list(x.chunk(micro_batches))


def trained(norm: Norm, parts: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """An optimizer step's forwards and backwards, then its update; gradients of x for losses sum(weights * y)."""
    stats, gradients = Stats(), []
    for x, weight in zip(parts, weights, strict=True):
        tokens = Tokens.from_ids(
            torch.zeros(x.shape[:2], dtype=torch.long), stats=stats, aux_loss_weight=1 / len(parts)
        )
        x = x.clone().requires_grad_()
        # The mean over the tokens of all micro-batches, as the trainer's loss is.
        ((weight * norm(x, tokens)).sum() / (len(parts) * x.shape[0] * x.shape[1])).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    norm.update_state(stats.means(), WeightWriter())
    return gradients


def test_batch_is_torch_batch_norm() -> None:
    norm, theirs = built("batch"), torch.nn.BatchNorm1d(WIDTH, eps=1e-5, momentum=0.1, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(norm.get_parameter("weight"))
        theirs.bias.copy_(norm.get_parameter("bias"))
    for step in range(STEPS):
        (x,), weight = batch(step), drawn(2, 3, WIDTH, seed=50 + step)
        (found,) = trained(norm, [x], [weight])
        leaf = x.clone().requires_grad_()
        ((weight * theirs(leaf.flatten(0, 1)).view_as(x)).sum() / 6).backward()
        torch.testing.assert_close(found, leaf.grad, rtol=1e-10, atol=1e-12)
    for mine, name in (("mean", "running_mean"), ("variance", "running_var")):
        torch.testing.assert_close(norm.get_parameter(mine).detach(), getattr(theirs, name), rtol=1e-10, atol=1e-12)
    for name in ("weight", "bias"):
        torch.testing.assert_close(norm.get_parameter(name).grad, theirs.get_parameter(name).grad)
    norm.eval()
    theirs.eval()
    (x,) = batch(9)
    torch.testing.assert_close(norm(x), theirs(x.flatten(0, 1)).view_as(x), rtol=1e-10, atol=1e-12)


class PaperPowerNorm:
    """Shen et al. 2020, algorithms 1 (forward) and 2 (backward), on rows [B, D]; the loss is their mean."""

    def __init__(self, weight: Tensor, bias: Tensor, alpha: float, warmup: int) -> None:
        self.weight, self.bias, self.alpha, self.warmup = weight, bias, alpha, warmup
        self.psi_squared, self.nu, self.steps = torch.ones(WIDTH).double(), torch.zeros(WIDTH).double(), 0

    def step(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """y and dL/dx for dL/dy = `gradient`."""
        psi = (self.psi_squared + 1e-5).sqrt()
        normalised = x / psi
        y = self.weight * normalised + self.bias
        inner = gradient * self.weight
        corrected = inner - self.nu * normalised
        big_gamma = (normalised * normalised).mean(0)
        big_lambda = (inner * normalised).mean(0)
        self.nu = self.nu * (1 - (1 - self.alpha) * big_gamma) + (1 - self.alpha) * big_lambda
        self.steps += 1
        decay = 1 - 1 / self.steps if self.steps <= self.warmup else self.alpha
        self.psi_squared = decay * self.psi_squared + (1 - decay) * (x * x).mean(0)
        return y, corrected / psi


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_power_is_the_papers_two_algorithms(micro_batches: int) -> None:
    norm = built("power", alpha=0.8, warmup_steps=2, groups=0)
    weight, bias = (norm.get_parameter(name).detach().clone() for name in ("weight", "bias"))
    paper = PaperPowerNorm(weight, bias, 0.8, 2)
    for step in range(STEPS):
        parts = batch(step, micro_batches)
        slopes = list(drawn(2 * micro_batches, 3, WIDTH, seed=50 + step).chunk(micro_batches))
        rows = torch.cat(parts).flatten(0, 1)
        # Algorithm 2's gradients are those of a mean over the rows.
        y, expected = paper.step(rows, torch.cat(slopes).flatten(0, 1) / len(rows))
        norm.train()
        torch.testing.assert_close(norm(torch.cat(parts)).flatten(0, 1), y, rtol=1e-10, atol=1e-12)
        found = torch.cat(trained(norm, parts, slopes)).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # The correction is kept in units of one token's gradient.
    torch.testing.assert_close(norm.get_parameter("correction").detach(), paper.nu * len(rows), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(norm.get_parameter("square").detach(), paper.psi_squared, rtol=1e-9, atol=1e-12)
    assert paper.nu.abs().max() > 0.001


def test_power_divides_each_token_by_its_length_in_groups() -> None:
    grouped, plain = built("power", groups=1), built("power", groups=0)
    (x,) = batch(0)
    length = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(grouped(x), plain(x / length), rtol=1e-12, atol=1e-12)


class Padded(Tokens):
    """Tokens of which those with the id 1 are padding."""

    def real(self) -> Tensor:
        return self.ids == 0

    def count(self) -> float:
        return float(self.real().sum())


def test_padding_has_no_correction_of_power() -> None:
    """With a running correction, gradients of the text are those without padding, and those of padding its own."""
    (x,), mask = batch(0), torch.tensor([[0, 0, 1], [0, 1, 1]])
    norm, gradients = built("power"), []
    with torch.no_grad():
        norm.get_parameter("correction").copy_(drawn(WIDTH, seed=3))
    for rows, tokens in (
        (x, Padded(mask, mask, forward=Forward(aux_loss_weight=0.3))),
        (x[mask == 0][None], Tokens(torch.zeros(1, 3), torch.zeros(1, 3), forward=Forward(aux_loss_weight=0.3))),
    ):
        leaf = rows.clone().requires_grad_()
        y = norm(leaf, tokens)
        (y[mask == 0] if len(rows) == 2 else y).square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    padded, alone = gradients
    torch.testing.assert_close(padded[mask == 0], alone[0], rtol=1e-13, atol=1e-14)
    assert not padded[mask == 1].any()


def test_padding_does_not_count() -> None:
    (x,), mask = batch(0), torch.tensor([[0, 0, 1], [0, 1, 1]])
    tokens = Padded(mask, mask)
    norm = built("batch")
    rows = x[mask == 0]
    expected = (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()
    found = (norm(x, tokens)[mask == 0] - norm.get_parameter("bias")) / norm.get_parameter("weight")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
