"""The Triton kernels of rope, gated_activation and bias_dropout_residual against the references."""

import torch

from xscale_kernels.bias_dropout_residual import bias_dropout_residual


def test_dropout_drops_a_share_and_the_gradient_follows_it(device: str) -> None:
    x, residual = (torch.randn(6, 1500, device=device, requires_grad=True) for _ in range(2))
    out = bias_dropout_residual(x, residual, p=0.3, implementation="triton")
    dropped = (out - residual).abs() < 1e-7
    assert abs(dropped.float().mean().item() - 0.3) < 0.03
    assert not torch.equal(dropped[0], dropped[1])
    (dx,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(dx, (~dropped).float() / 0.7)
    torch.testing.assert_close((out - residual)[~dropped], x[~dropped] / 0.7, atol=1e-5, rtol=1e-5)
