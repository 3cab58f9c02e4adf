"""rmsnorm and layernorm against their definitions, forward and gradients."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels import rows
from xscale_kernels.layernorm import layernorm
from xscale_kernels.layernorm import reference as layernorm_reference
from xscale_kernels.rmsnorm import reference as rmsnorm_reference
from xscale_kernels.rmsnorm import rmsnorm

PRECISIONS = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
SHAPES = [(7, 5), (0, 4), (1, 1), (3, 11, 33)]


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("implementation", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rmsnorm(
    monkeypatch: pytest.MonkeyPatch,
    agree: Callable[..., None],
    dtype: torch.dtype,
    bound: float,
    implementation: str,
    weighted: bool,
) -> None:
    monkeypatch.setattr("xscale_kernels.refusals.SMALL", 0)
    monkeypatch.setattr(rows, "CACHE_BYTES", 512)
    for shape in SHAPES:
        x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
        agree(
            lambda x, w: rmsnorm(x, w if weighted else None, 1e-5, implementation=implementation),
            lambda x, w: rmsnorm_reference.rmsnorm(x, w if weighted else None, 1e-5),
            (x, weight),
            dtype,
            bound,
        )


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_layernorm(agree: Callable[..., None], dtype: torch.dtype, bound: float, implementation: str) -> None:
    for shape in SHAPES[:-2] + SHAPES[-1:]:
        x, w, b = (torch.randn(size, dtype=torch.float64) for size in (shape, shape[-1], shape[-1]))
        agree(
            lambda x, w, b: layernorm(x, w, b, 1e-5, implementation=implementation),
            lambda x, w, b: layernorm_reference.layernorm(x, w, b, 1e-5),
            (x, w, b),
            dtype,
            bound,
        )


def test_gradcheck_strides_and_mixed_precision() -> None:
    x = torch.randn(4, 6, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    turned = x.transpose(1, 2)
    from xscale_kernels.rmsnorm import cpu

    assert torch.autograd.gradcheck(lambda a, w: cpu.rmsnorm(a.transpose(1, 2), w, 1e-6), (x, weight))
    torch.testing.assert_close(rmsnorm(turned, weight), rmsnorm(turned.contiguous(), weight))
    assert rmsnorm(turned.bfloat16(), weight.float()).dtype == torch.bfloat16


def test_compiles_whole_and_runs_on_meta() -> None:
    x, weight = torch.randn(300, 200), torch.randn(200)
    whole = torch.compile(lambda a, w: rmsnorm(a, w), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, weight), rmsnorm(x, weight))
    assert rmsnorm(x.to("meta"), weight.to("meta")).shape == x.shape


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="weight of the last axis's size 3"):
        rmsnorm(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="apex needs a GPU"):
        rmsnorm(torch.zeros(2, 3), None, implementation="apex")
