"""unpermute's Triton kernels against the reference."""

import pytest
import torch

from xscale_kernels.permute import permute, reference, unpermute


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_forward_and_gradients(device: str, dtype: torch.dtype, weighted: bool) -> None:
    where = torch.tensor([2, 0, 2, 5, 2, 0], device=device)
    x = torch.randn(7, 19, device=device).to(dtype).requires_grad_()
    y = torch.randn(6, 19, device=device).to(dtype).requires_grad_()
    w = torch.rand(6, device=device, requires_grad=True)
    scale = w if weighted else None
    inputs = (x, y, w) if weighted else (x, y)
    ours = permute(x, where, implementation="triton"), unpermute(y, where, scale, 7, implementation="triton")
    theirs = reference.permute(x, where), reference.unpermute(y, where, scale, 7)
    seeds = tuple(torch.randn_like(each) for each in theirs)
    got, wanted = torch.autograd.grad(ours, inputs, seeds), torch.autograd.grad(theirs, inputs, seeds)
    for a, b in zip((*ours, *got), (*theirs, *wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows(device: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    out = unpermute(torch.zeros(0, 3, device=device), nothing, None, 4, implementation="triton")
    assert torch.equal(out, torch.zeros(4, 3, device=device))
