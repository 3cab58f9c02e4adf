"""AdamW's one-launch Triton kernel against the reference."""

import pytest
import torch

from xscale_kernels.adamw import adamw_step_


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [True, False])
def test_one_launch(device: str, grad_dtype: torch.dtype, scaled: bool) -> None:
    shapes = [(3, 5), (7,), (0,), (5003,), (1,)]
    params, means = ([torch.randn(shape, device=device) for shape in shapes] for _ in range(2))
    squares = [torch.rand(shape, device=device) for shape in shapes]
    grads = [torch.randn(shape, device=device).to(grad_dtype) for shape in shapes]
    scale = torch.tensor(0.25, device=device) if scaled else None
    ours, theirs = ([[each.clone() for each in role] for role in (params, means, squares)] for _ in range(2))
    for name, (p, m, v) in (("triton", ours), ("reference", theirs)):
        for step in (1, 2):
            adamw_step_(p, grads, m, v, step=step, lr=0.01, weight_decay=0.1, scale=scale, implementation=name)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_nothing_past_a_tensors_end_is_touched(device: str) -> None:
    buffers = [torch.ones(8, device=device) for _ in range(4)]
    roles = [[buffer[:5]] for buffer in buffers]
    adamw_step_(*roles, step=1, lr=0.1, implementation="triton")
    for buffer in buffers:
        assert torch.equal(buffer[5:], torch.ones(3, device=device))
    assert not torch.equal(buffers[0][:5], torch.ones(5, device=device))
