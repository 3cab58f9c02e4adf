"""adamw_step_ against torch.optim.AdamW in float64, and the implementations against each other."""

import pytest
import torch

from xscale_kernels.adamw import adamw_step_

SHAPES = [(3, 5), (7,), (1,), (0,), (65, 3)]


def state(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    params, means = ([torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(2))
    return [params, means, [torch.rand(shape).to(dtype) for shape in SHAPES]]


@pytest.mark.parametrize("implementation", ["torch", "foreach", "reference"])
def test_equals_torchs_optimizer(implementation: str) -> None:
    params = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    theirs = [each.clone().requires_grad_() for each in params]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    means, squares = ([torch.zeros_like(each) for each in params] for _ in range(2))
    for step in range(1, 6):
        grads = [torch.randn_like(each) for each in params]
        for each, grad in zip(theirs, grads, strict=True):
            each.grad = grad * 0.5
        optimizer.step()
        adamw_step_(
            params,
            grads,
            means,
            squares,
            step=step,
            lr=0.01,
            betas=(0.8, 0.9),
            eps=1e-6,
            weight_decay=0.1,
            scale=torch.tensor(0.5),
            implementation=implementation,
        )
    for ours, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(ours, other.detach(), atol=1e-12, rtol=1e-12)


def test_roles_of_different_dtypes_take_the_reference() -> None:
    params, means, squares = state(torch.float32)
    grads = [torch.randn(shape).bfloat16() for shape in SHAPES]
    before = [each.clone() for each in params]
    adamw_step_(params, grads, means, squares, step=3, lr=0.1)
    assert any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="tensor 0 differs in shape"):
        adamw_step_([torch.zeros(2)], [torch.zeros(3)], [torch.zeros(2)], [torch.zeros(2)], step=1, lr=0.1)
    with pytest.raises(ValueError, match="count from 1"):
        adamw_step_([torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2)], step=0, lr=0.1)
