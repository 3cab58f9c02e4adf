"""rmsnorm's and layernorm's Triton kernels against the references."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels.layernorm import layernorm
from xscale_kernels.layernorm import reference as layernorm_reference
from xscale_kernels.rmsnorm import reference as rmsnorm_reference
from xscale_kernels.rmsnorm import rmsnorm

PRECISIONS = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
SHAPES = [(7, 5), (0, 4), (2, 3, 33)]


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_norms(
    agree: Callable[..., None], device: str, dtype: torch.dtype, bound: float, shape: tuple[int, ...], scaled: bool
) -> None:
    x, w, b = (torch.randn(size, device=device) for size in (shape, shape[-1], shape[-1]))
    agree(
        lambda x, w: rmsnorm(x, w if scaled else None, 1e-5, implementation="triton"),
        lambda x, w: rmsnorm_reference.rmsnorm(x, w if scaled else None, 1e-5),
        (x, w),
        dtype,
        bound,
    )
    agree(
        lambda x, w, b: layernorm(x, w, b if scaled else None, 1e-5, implementation="triton"),
        lambda x, w, b: layernorm_reference.layernorm(x, w, b if scaled else None, 1e-5),
        (x, w, b),
        dtype,
        bound,
    )


def test_strided_rows(device: str) -> None:
    x = torch.randn(6, 9, device=device, requires_grad=True)
    every_other, turned = x[::2], x.t()
    for each in (every_other, turned):
        ours, theirs = (rmsnorm(each, None, implementation=name) for name in ("triton", "reference"))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (ours, theirs)))
