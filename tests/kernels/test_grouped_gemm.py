"""grouped_gemm against a loop of F.linear, forward and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale_kernels.grouped_gemm import grouped_gemm, reference
from xscale_kernels.select import UnusableError

COUNTS = [[3, 0, 5, 2], [0, 0, 0], [7], [0, 1, 0, 63]]


def draw(counts: list[int], D: int, F: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(counts), D, dtype=torch.float64)
    w = torch.randn(len(counts), F, D, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), torch.randn(sum(counts), F, dtype=dtype)


def compare(counts: list[int], D: int, F: int, dtype: torch.dtype, implementation: str | None, bound: float) -> None:
    x, w, dy = draw(counts, D, F, dtype)
    y = grouped_gemm(x, w, torch.tensor(counts), implementation=implementation)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    y64 = reference.grouped_gemm(x64, w64, torch.tensor(counts))
    wanted = (y64, *torch.autograd.grad(y64, (x64, w64), dy.double()))
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= bound * max(1.0, theirs.norm().item())


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("implementation", [None, "cpu", "reference"])
def test_equals_the_reference_in_float64(counts: list[int], implementation: str | None) -> None:
    compare(counts, 5, 3, torch.float64, implementation, 1e-13)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("implementation", ["cpu", "torch"])
def test_precisions(dtype: torch.dtype, bound: float, implementation: str) -> None:
    compare([3, 0, 5, 24], 16, 8, dtype, implementation, bound)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 9))
def test_drawn_shapes(counts: list[int], D: int, F: int) -> None:
    compare(counts, D, F, torch.float64, None, 1e-13)


def test_gradcheck_and_registration() -> None:
    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, [2, 0, 3]), (x, w))
    torch.library.opcheck(torch.ops.xscale.grouped_gemm.default, (x, w, torch.tensor([2, 0, 3]), ""))


def test_strided_operands() -> None:
    x, w, _ = draw([4, 6], 6, 4, torch.float64)
    odd_x, odd_w = x.detach().t().contiguous().t(), w.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(grouped_gemm(odd_x, odd_w, [4, 6]), grouped_gemm(x, w, [4, 6]))


def test_compiles_whole_and_runs_on_meta() -> None:
    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    counts = torch.tensor([2, 0, 3])
    whole = torch.compile(lambda a, b, c: grouped_gemm(a, b, c), fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x, w, counts), grouped_gemm(x, w, counts))
    assert grouped_gemm(x.to("meta"), w.to("meta"), [2, 0, 3]).shape == (5, 2)


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    with FlopCounterMode(display=False) as counter:
        grouped_gemm(x, w, [2, 0, 3]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 3 * 2


def test_faults_are_named() -> None:
    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    with pytest.raises(ValueError, match="the counts sum to 4, x has 5 rows"):
        grouped_gemm(x, w, [2, 0, 2])
    with pytest.raises(ValueError, match="one count a group"):
        grouped_gemm(x, w, [2, 3])
    with pytest.raises(ValueError, match="one dtype"):
        grouped_gemm(x.float(), w, [2, 0, 3])
    with pytest.raises(UnusableError, match=r"Triton needs a GPU.*These can: cpu, reference"):
        grouped_gemm(x, w, [2, 0, 3], implementation="triton")
