"""Aggregation of heads by capsule routing against the papers' equations, one token at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, dims, drawn, ready, tokens
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.routing_aggregation import FLOOR, RoutingAggregation

LENGTH, HEADS, CAPSULES = 7, 4, 2


def mixer(**settings: Any) -> RoutingAggregation:
    config = RoutingAggregation.Config(heads=HEADS, capsules=CAPSULES, **settings)
    assert RoutingAggregation.check(config, dims(), "mixer") == []
    part = ready(RoutingAggregation(config, dims(length=LENGTH)))
    with torch.no_grad():
        part.votes.mul_(4)
    return part


def dynamic(votes: list[list[Tensor]], iterations: int) -> list[Tensor]:
    """Sabour et al. 2017, procedure 1: votes [h][n]."""
    logits = [[torch.zeros(()) for _ in range(CAPSULES)] for _ in range(HEADS)]
    for _ in range(iterations):
        coupling = [[torch.exp(b) / sum(torch.exp(c) for c in row) for b in row] for row in logits]
        capsules = []
        for n in range(CAPSULES):
            s = sum(coupling[h][n] * votes[h][n] for h in range(HEADS))
            length = (s @ s).sqrt()
            capsules.append(length**2 / (1 + length**2) * s / length)
        logits = [[logits[h][n] + capsules[n] @ votes[h][n] for n in range(CAPSULES)] for h in range(HEADS)]
    return capsules


def em(part: RoutingAggregation, votes: list[list[Tensor]], iterations: int, temperature: float) -> list[Tensor]:
    """Hinton et al. 2018, procedure 1, with heads that are all active: votes [h][n]."""
    weights = [[torch.tensor(1 / CAPSULES)] * CAPSULES for _ in range(HEADS)]
    for _ in range(iterations):
        means, deviations, active = [], [], []
        for n in range(CAPSULES):
            total = sum(weights[h][n] for h in range(HEADS))
            mean = sum(weights[h][n] * votes[h][n] for h in range(HEADS)) / total
            variance = sum(weights[h][n] * (votes[h][n] - mean) ** 2 for h in range(HEADS)) / total + FLOOR
            cost = sum((part.beta_u[n] + torch.log(variance[d].sqrt())) * total for d in range(len(mean)))
            means.append(mean)
            deviations.append(variance.sqrt())
            active.append(torch.sigmoid(temperature * (part.beta_a[n] - cost)))
        for h in range(HEADS):
            densities = []
            for n in range(CAPSULES):
                gaussian = torch.exp(-((votes[h][n] - means[n]) ** 2) / (2 * deviations[n] ** 2))
                densities.append(active[n] * (gaussian / (deviations[n] * math.sqrt(2 * math.pi))).prod())
            weights[h] = [density / sum(densities) for density in densities]
    return [active[n] * means[n] for n in range(CAPSULES)]


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("routing", ["dynamic", "em"])
def test_it_routes_as_the_papers_say(routing: str, iterations: int) -> None:
    settings = {} if routing == "dynamic" else {"inverse_temperature": 0.3}
    part = mixer(routing=routing, iterations=iterations, **settings)
    o = drawn(2, HEADS, LENGTH, WIDTH // HEADS, seed=4).requires_grad_()
    outs = []
    for b in range(2):
        for t in range(LENGTH):
            votes = [[part.votes[h, n] @ o[b, h, t] for n in range(CAPSULES)] for h in range(HEADS)]
            capsules = dynamic(votes, iterations) if routing == "dynamic" else em(part, votes, iterations, 0.3)
            outs.append(part.o.weight @ torch.cat(capsules))
    wanted, out = torch.stack(outs).view(2, LENGTH, WIDTH), part.project_output(o)
    torch.testing.assert_close(out, wanted, rtol=1e-7, atol=1e-9)
    above = drawn(*out.shape, seed=3)
    leaves = [o, part.votes, part.o.weight, *([part.beta_a, part.beta_u] if routing == "em" else [])]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert ours.any()


def test_heads_attend_as_in_attention() -> None:
    """With votes that copy each head to its own capsule, one round of dynamic routing only squashes."""
    config = RoutingAggregation.Config(heads=HEADS, routing="dynamic", iterations=1)
    part = ready(RoutingAggregation(config, dims(length=LENGTH)))
    plain = ready(Attention(Attention.Config(heads=HEADS), dims(length=LENGTH)))
    plain.load_state_dict({name: value for name, value in part.state_dict().items() if name != "votes"})
    channels = WIDTH // HEADS
    with torch.no_grad():
        part.votes.zero_()
        for head in range(HEADS):
            part.votes[head, head].copy_(HEADS * torch.eye(channels))
        for linear in (plain.o, part.o):
            linear.weight.copy_(torch.eye(WIDTH))
    x = drawn(2, LENGTH, WIDTH)
    heads = plain(x, tokens(LENGTH)).unflatten(-1, (HEADS, -1))
    length = heads.norm(dim=-1, keepdim=True)
    wanted = (length / (1 + length**2) * heads).flatten(2)
    torch.testing.assert_close(part(x, tokens(LENGTH)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("routing", ["dynamic", "em"])
def test_equal_heads_and_zeros_have_finite_gradients(routing: str) -> None:
    part = mixer(routing=routing)
    for o in (torch.zeros(1, HEADS, 2, WIDTH // HEADS), torch.ones(1, HEADS, 2, WIDTH // HEADS)):
        leaf = o.double().requires_grad_()
        part.project_output(leaf).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert part.votes.grad is not None
        assert part.votes.grad.isfinite().all()


def test_capsules_divide_the_channels() -> None:
    (problem,) = RoutingAggregation.check(RoutingAggregation.Config(heads=4, capsules=5), dims(), "mixer")
    assert str(problem).startswith("mixer.capsules: capsules=5 does not divide the 32 channels of the heads")
    assert "Take 1, 2, 4 or 8" in str(problem)
