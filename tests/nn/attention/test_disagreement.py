"""Disagreement regularization against the paper's sums over pairs of heads, and what it leaves alone."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import HEADS, WIDTH, build, drawn, inputs, masks, seen
from xscale.nn.attention.disagreement import Disagreement
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax

WEIGHT = 0.25
TERMS = ("subspace_weight", "position_weight", "output_weight")


def cosine(one: Tensor, two: Tensor) -> Tensor:
    return (one * two).sum() / (one.square().sum().sqrt() * two.square().sum().sqrt())


def loss_of(term: str, q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """1/H^2 sum_ij of one term, each pair of heads at each token by itself."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~shown, float("-inf")).softmax(-1)
    outputs = weights @ v
    sums = []
    for b in range(len(q)):
        for t in range((v if term == "subspace_weight" else q).shape[2]):
            pairs = [(i, j) for i in range(HEADS) for j in range(HEADS)]
            if term == "position_weight":
                values = [(weights[b, i, t] * weights[b, j, t]).sum() for i, j in pairs]
            else:
                x = v if term == "subspace_weight" else outputs
                values = [cosine(x[b, i, t], x[b, j, t]) for i, j in pairs]
            sums.append(torch.stack(values).sum() / HEADS**2)
    return torch.stack(sums).mean()


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("causal", [True, False])
def test_each_loss_is_the_papers_sum_over_pairs(causal: bool, term: str) -> None:
    core = build(Disagreement.Config(**{**dict.fromkeys(TERMS, 0.0), term: 0.7}), causal=causal)
    for mask in masks(18, causal=causal):
        q, k, v = inputs(mask.queries, mask.keys)
        above = drawn(2, HEADS, mask.queries, WIDTH, seed=3)
        plain, with_loss = (
            torch.autograd.grad(core(q, k, v, replace(mask, aux_loss_weight=weight)), (q, k, v), above)
            for weight in (None, WEIGHT)
        )
        wanted = torch.autograd.grad(
            WEIGHT * 0.7 * loss_of(term, q, k, v, seen(mask)), (q, k, v), allow_unused=True, materialize_grads=True
        )
        for before, after, extra in zip(plain, with_loss, wanted, strict=True):
            torch.testing.assert_close(after - before, extra, rtol=1e-8, atol=1e-10)


def test_the_losses_add_up() -> None:
    (q, k, v), mask = inputs(18), AttentionMask(18, 18, True)
    core = build(Disagreement.Config(subspace_weight=0.1, position_weight=0.2, output_weight=0.3), causal=True)
    assert isinstance(core, Disagreement)
    wanted = sum(
        factor * loss_of(term, q, k, v, seen(mask)) for term, factor in zip(TERMS, (0.1, 0.2, 0.3), strict=True)
    )
    torch.testing.assert_close(core.disagreement_loss(q, k, v, core(q, k, v, mask), mask), wanted)


def test_heads_that_agree_have_the_greatest_loss() -> None:
    mask = AttentionMask(18, 18, True)
    for term in ("subspace_weight", "output_weight"):
        core = build(Disagreement.Config(**{**dict.fromkeys(TERMS, 0.0), term: 1.0}), causal=True)
        q, k, v = (x[:, :1].expand(-1, HEADS, -1, -1) for x in inputs(18, groups=HEADS))
        assert isinstance(core, Disagreement)
        same = core.disagreement_loss(q, k, v, core(q, k, v, mask), mask)
        torch.testing.assert_close(same, torch.ones_like(same))


@pytest.mark.parametrize("causal", [True, False])
def test_its_outputs_are_those_of_softmax_attention(causal: bool) -> None:
    core, plain = build(Disagreement.Config(), causal=causal), build(Softmax.Config(), causal=causal)
    for mask in masks(40, causal=causal):
        q, k, v = inputs(mask.queries, mask.keys)
        for weight in (None, 0.5):
            assert torch.equal(core(q, k, v, replace(mask, aux_loss_weight=weight)), plain(q, k, v, mask))
