"""rope, gated_activation and bias_dropout_residual against their definitions, forward and gradients."""

import pytest
import torch

from xscale_kernels import rows
from xscale_kernels.bias_dropout_residual import bias_dropout_residual
from xscale_kernels.gated_activation import KINDS, gated_activation
from xscale_kernels.gated_activation.op import reference_gated_activation
from xscale_kernels.rope import rope


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xscale_kernels.refusals.SMALL", 0)
    monkeypatch.setattr(rows, "CACHE_BYTES", 512)


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.randn(shape, dtype=torch.float64)
    return phase.cos(), phase.sin()


def test_rope_keeps_lengths_and_depends_on_distance_only() -> None:
    place = torch.arange(9, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    q, k = torch.randn(1, 1, 1, 6, dtype=torch.float64), torch.randn(1, 1, 1, 6, dtype=torch.float64)
    for interleaved in (True, False):
        left, right = (
            rope(each.expand(1, 9, 1, 6), place.cos(), place.sin(), interleaved=interleaved)[0, :, 0] for each in (q, k)
        )
        torch.testing.assert_close(left.norm(dim=-1), q.norm().expand(9))
        scores = left @ right.t()
        torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


def test_kinds_are_what_their_papers_say() -> None:
    gate, up = torch.randn(50, dtype=torch.float64) * 3, torch.randn(50, dtype=torch.float64)
    phi = 0.5 * (1 + torch.erf(gate / 2**0.5))
    expected = {
        "glu": up / (1 + (-gate).exp()),
        "bilinear": gate * up,
        "reglu": gate.clamp_min(0) * up,
        "geglu": gate * phi * up,
        "geglu_tanh": 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up,
        "quick_geglu": gate / (1 + (-1.702 * gate).exp()) * up,
        "swiglu": gate / (1 + (-gate).exp()) * up,
    }
    assert set(expected) == set(KINDS)
    for kind, wanted in expected.items():
        torch.testing.assert_close(gated_activation(gate, up, kind), wanted)


def test_halves_of_one_tensor() -> None:
    both = torch.randn(33, 14, dtype=torch.float64, requires_grad=True)
    ours = gated_activation(*both.chunk(2, -1), "swiglu")
    theirs = reference_gated_activation(*both.chunk(2, -1), "swiglu")
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), both)[0] for y in (ours, theirs)))


def test_dropout_drops_a_share_and_the_gradient_follows_it() -> None:
    x, residual = torch.randn(400, 30, requires_grad=True), torch.randn(400, 30, requires_grad=True)
    bias = torch.randn(30, requires_grad=True)
    out = bias_dropout_residual(x, residual, bias, p=0.3, implementation="cpu")
    branch = out - residual
    dropped = branch.abs() < 1e-6
    assert abs(dropped.float().mean().item() - 0.3) < 0.02
    torch.testing.assert_close(branch[~dropped], ((x + bias) / 0.7)[~dropped], atol=1e-5, rtol=1e-5)
    dx, dr, db = torch.autograd.grad(out.sum(), (x, residual, bias))
    torch.testing.assert_close(dx, (~dropped).float() / 0.7)
    torch.testing.assert_close(db, dx.sum(0))
    assert torch.equal(dr, torch.ones_like(dr))
    torch.manual_seed(7)
    first = bias_dropout_residual(x, residual, bias, p=0.3)
    torch.manual_seed(7)
    assert torch.equal(first, bias_dropout_residual(x, residual, bias, p=0.3))


def test_faults_are_named() -> None:
    x = torch.zeros(2, 3, 1, 4)
    with pytest.raises(ValueError, match="rotate 6 channels, a head has 4"):
        rope(x, torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="no kind 'gelu'; there are: glu"):
        gated_activation(x, x, "gelu")
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        bias_dropout_residual(x, x, p=1.0)
