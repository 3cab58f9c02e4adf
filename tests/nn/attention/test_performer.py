"""Random features: the estimate is the definition's, and comes close to the softmax with many features."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, drawn, inputs, masks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.random_features import RandomProjection
from xscale.nn.attention.performer import Performer
from xscale.nn.dims import Dims


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("estimator", ["positive", "trigonometric", "relu"])
def test_it_is_the_quadratic_estimate(estimator: str, causal: bool) -> None:
    core = build(Performer.Config(features=40, estimator=estimator), causal=causal)
    w = core.projection(drawn(1), None)

    def features(x: Tensor) -> Tensor:
        x = x / 8**0.25
        along, square = x @ w.mT, (x * x).sum(-1, keepdim=True)
        if estimator == "positive":
            return (along - square / 2).exp()
        if estimator == "relu":
            return along.clamp(min=0) + 1e-3
        return (square / 2).exp() * torch.cat((along.sin(), along.cos()), -1)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        rows = features(q)
        if estimator == "positive":
            rows = rows / rows.amax(-1, keepdim=True) + 1e-6
        weights = torch.where(seen, rows @ features(k).mT, 0)
        divisor = weights.sum(-1, keepdim=True)
        if estimator == "trigonometric":
            lengths = [(x * x).sum(-1) / 8**0.5 / 2 for x in (q, k)]
            most = 40 * torch.where(seen, (lengths[0][..., None] + lengths[1][..., None, :]).exp(), 0)
            divisor = torch.maximum(divisor, most.sum(-1, keepdim=True) / 80)
        return weights @ v / divisor

    for mask in masks(100, causal=causal):
        agree(core, mask, reference, tolerance=1e-7)


@pytest.mark.parametrize("estimator", ["positive", "trigonometric"])
def test_many_features_come_close_to_softmax(estimator: str) -> None:
    q, k, v = (0.6 * x.detach() for x in inputs(60, groups=4))
    exact = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
    errors = []
    for features in (64, 1024, 16384):
        core = build(Performer.Config(features=features, estimator=estimator), causal=False)
        errors.append(float((core(q, k, v, AttentionMask(60, 60, False)) - exact).norm() / exact.norm()))
    assert errors[2] < 0.05
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("causal", [True, False])
def test_long_keys_have_their_weight_in_float32(causal: bool) -> None:
    """Against the same formula in float64; features of such keys are all zero in float32."""
    core = build(Performer.Config(features=128), causal=causal)
    for length, spread in ((1, 40.0), (64, 5.0), (64, 10.0)):
        leaves = [x.detach().mul(spread).float().requires_grad_() for x in inputs(length)[:2]]
        leaves.append(inputs(length)[2].detach().float().requires_grad_())
        exact = [x.detach().double().requires_grad_() for x in leaves]
        mask = AttentionMask(length, length, causal)
        outs = [core(*x, mask) for x in (leaves, exact)]
        found, wanted = (
            torch.autograd.grad(out.square().sum(), x) for out, x in zip(outs, (leaves, exact), strict=True)
        )
        for one, two in zip((outs[0], *found), (outs[1], *wanted), strict=True):
            assert (one - two).norm() <= 1e-3 * two.norm() + 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", [16, 64, 256])
def test_trigonometric_outputs_stay_near_the_values(features: int, causal: bool) -> None:
    """The estimate is unbiased; with heads of 64 and unit normal queries and keys, sums of the products are near zero
    now and then."""
    dims = Dims(width=64, depth=1, vocabulary=9, length=256, causal=causal)
    core = Performer(Performer.Config(features=features, estimator="trigonometric"), dims, 1, 64).eval()
    q, k, v = (drawn(8, 1, 256, 64, seed=at) for at in range(3))
    assert core(q, k, v, AttentionMask(256, 256, causal)).abs().max() < 20 * v.abs().max()


def test_directions_are_orthogonal_and_as_long_as_gaussian_ones() -> None:
    w = RandomProjection(8000, 16, seed=1, redraw=False)(drawn(1), None)
    block = w[:16]
    off = block @ block.mT - torch.diag((block * block).sum(-1))
    assert off.abs().max() < 1e-10
    assert float((w * w).sum(-1).mean()) == pytest.approx(16, rel=0.03)
    assert float((w.mean(0)).abs().max()) < 0.05


def test_training_may_redraw_and_evaluation_does_not() -> None:
    core = build(Performer.Config(features=16, redraw=True), causal=True)
    q, k, v = inputs(20)
    mask = AttentionMask(20, 20, True)
    assert torch.equal(core(q, k, v, mask), core(q, k, v, mask))
    core.train()
    assert not torch.equal(core(q, k, v, mask), core(q, k, v, mask))
