"""route's Triton kernels against the reference."""

import pytest
import torch

from xscale_kernels.router import route


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("N", "E", "k"), [(7, 5, 2), (1, 1, 1), (0, 4, 2), (9, 33, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradient(device: str, score: str, N: int, E: int, k: int, dtype: torch.dtype) -> None:
    # Distinct values in every row, so that there is one right order even in bfloat16.
    order = torch.stack([torch.randperm(E) for _ in range(N)]) if N else torch.zeros(0, E)
    logits = (order.float() / 16 - 1).to(device, dtype).requires_grad_()
    bias = torch.linspace(0, 0.5, E, device=device)
    for given in (None, bias) if E < 10 else (None,):
        ours, theirs = (route(logits, k, score=score, bias=given, implementation=i) for i in ("triton", "reference"))
        assert torch.equal(ours.experts, theirs.experts)
        seeds = torch.randn_like(theirs.scores), torch.randn_like(theirs.weights)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(a, b)
        got, wanted = (torch.autograd.grad(each[:2], logits, seeds)[0] for each in (ours, theirs))
        torch.testing.assert_close(got, wanted)
