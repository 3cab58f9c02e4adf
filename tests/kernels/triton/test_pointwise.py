"""The Triton kernels of rope, gated_activation and bias_dropout_residual against the references."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels.bias_dropout_residual import bias_dropout_residual
from xscale_kernels.bias_dropout_residual import reference as sum_reference
from xscale_kernels.gated_activation import KINDS, gated_activation
from xscale_kernels.gated_activation import reference as gate_reference
from xscale_kernels.rope import reference as rope_reference
from xscale_kernels.rope import rope

PRECISIONS = [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (3, 3)], ids=str)
def test_rope(
    agree: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    bound: float,
    interleaved: bool,
    shape: tuple[int, ...],
) -> None:
    phase = torch.randn(shape, device=device)
    agree(
        lambda x: rope(x.transpose(1, 2), phase.cos(), phase.sin(), interleaved=interleaved, implementation="triton"),
        lambda x: rope_reference.rope(x.transpose(1, 2), phase.cos().double(), phase.sin().double(), interleaved),
        (torch.randn(2, 5, 3, 8, device=device),),
        dtype,
        bound,
    )


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation(agree: Callable[..., None], device: str, dtype: torch.dtype, bound: float, kind: str) -> None:
    agree(
        lambda both: gated_activation(*both.chunk(2, -1), kind, implementation="triton"),
        lambda both: gate_reference.gated_activation(*both.chunk(2, -1), kind),
        (torch.randn(3, 2 * 1031, device=device) * 3,),
        dtype,
        bound,
    )


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_bias_residual(agree: Callable[..., None], device: str, dtype: torch.dtype, bound: float, biased: bool) -> None:
    agree(
        lambda x, r, b: bias_dropout_residual(x, r, b if biased else None, implementation="triton"),
        lambda x, r, b: sum_reference.bias_dropout_residual(x, r, b if biased else None, 0.0),
        (torch.randn(3, 1031, device=device), torch.randn(3, 1031, device=device), torch.randn(1031, device=device)),
        dtype,
        bound,
    )


def test_dropout_drops_a_share_and_the_gradient_follows_it(device: str) -> None:
    x, residual = (torch.randn(6, 1500, device=device, requires_grad=True) for _ in range(2))
    out = bias_dropout_residual(x, residual, p=0.3, implementation="triton")
    dropped = (out - residual).abs() < 1e-7
    assert abs(dropped.float().mean().item() - 0.3) < 0.03
    assert not torch.equal(dropped[0], dropped[1])
    (dx,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(dx, (~dropped).float() / 0.7)
    torch.testing.assert_close((out - residual)[~dropped], x[~dropped] / 0.7, atol=1e-5, rtol=1e-5)
