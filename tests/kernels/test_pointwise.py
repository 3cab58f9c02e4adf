"""rope, gated_activation and bias_dropout_residual against their definitions, forward and gradients."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels import rows
from xscale_kernels.bias_dropout_residual import bias_dropout_residual
from xscale_kernels.bias_dropout_residual import reference as sum_reference
from xscale_kernels.gated_activation import KINDS, gated_activation
from xscale_kernels.gated_activation import reference as gate_reference
from xscale_kernels.rope import reference as rope_reference
from xscale_kernels.rope import rope

PRECISIONS = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xscale_kernels.refusals.SMALL", 0)
    monkeypatch.setattr(rows, "CACHE_BYTES", 512)


def angles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.randn(shape, dtype=torch.float64)
    return phase.cos(), phase.sin()


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(33, 4), (2, 33, 4), (33, 3)], ids=str)
def test_rope(
    agree: Callable[..., None], dtype: torch.dtype, bound: float, interleaved: bool, shape: tuple[int, ...]
) -> None:
    cos, sin = angles(*shape)
    agree(
        lambda x: rope(x, cos, sin, interleaved=interleaved, implementation="cpu"),
        lambda x: rope_reference.rope(x, cos, sin, interleaved),
        (torch.randn(2, 33, 3, 8),),
        dtype,
        bound,
    )


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


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation(agree: Callable[..., None], dtype: torch.dtype, bound: float, kind: str) -> None:
    for shape in ((33, 7), (0, 3), (2, 5, 11)):
        agree(
            lambda g, u: gated_activation(g, u, kind),
            lambda g, u: gate_reference.gated_activation(g, u, kind),
            (torch.randn(shape), torch.randn(shape)),
            dtype,
            bound,
        )


def test_kinds_are_what_their_papers_say() -> None:
    gate, up = torch.randn(50, dtype=torch.float64) * 3, torch.randn(50, dtype=torch.float64)
    phi = 0.5 * (1 + torch.erf(gate / 2**0.5))
    expected = {
        "glu": up / (1 + (-gate).exp()),
        "bilinear": gate * up,
        "reglu": gate.clamp_min(0) * up,
        "geglu": gate * phi * up,
        "geglu_tanh": 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up,
        "swiglu": gate / (1 + (-gate).exp()) * up,
    }
    assert set(expected) == set(KINDS)
    for kind, wanted in expected.items():
        torch.testing.assert_close(gated_activation(gate, up, kind), wanted)


def test_halves_of_one_tensor() -> None:
    both = torch.randn(33, 14, dtype=torch.float64, requires_grad=True)
    ours = gated_activation(*both.chunk(2, -1), "swiglu")
    theirs = gate_reference.gated_activation(*both.chunk(2, -1), "swiglu")
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), both)[0] for y in (ours, theirs)))


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_bias_residual(agree: Callable[..., None], dtype: torch.dtype, bound: float, biased: bool) -> None:
    agree(
        lambda x, r, b: bias_dropout_residual(x, r, b if biased else None),
        lambda x, r, b: sum_reference.bias_dropout_residual(x, r, b if biased else None, 0.0),
        (torch.randn(5, 7, 3), torch.randn(5, 7, 3), torch.randn(3)),
        dtype,
        bound,
    )


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


def test_all_compile_whole() -> None:
    cos, sin = (each.float() for each in angles(33, 4))

    def block(x: torch.Tensor) -> torch.Tensor:
        turned = rope(x, cos, sin).flatten(2)
        return bias_dropout_residual(gated_activation(turned, turned, "swiglu"), turned)

    x = torch.randn(2, 33, 3, 8)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_faults_are_named() -> None:
    x = torch.zeros(2, 3, 1, 4)
    with pytest.raises(ValueError, match="turn 6 channels, a head has 4"):
        rope(x, torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="no kind 'gelu'; there are: glu"):
        gated_activation(x, x, "gelu")
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        bias_dropout_residual(x, x, p=1.0)
