"""grouped_gemm's Triton kernels against the reference."""

import pytest
import torch

from xscale_kernels.gated_activation import KINDS
from xscale_kernels.gated_activation.op import reference_gated_activation
from xscale_kernels.grouped_gemm import grouped_gemm
from xscale_kernels.grouped_gemm import triton as kernels
from xscale_kernels.grouped_gemm.gate_up import gate_up_hidden
from xscale_kernels.grouped_gemm.op import reference_forward, reference_outer
from xscale_kernels.triton_runtime import interpreting

PRECISIONS = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.float16, 2e-3)]
if not interpreting():
    # The interpreter's dot multiplies bfloat16 as the integers it keeps it in; the GPU has no float64 kernel.
    PRECISIONS = [*PRECISIONS[1:], (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize("counts", [[19, 0, 33, 1], [0, 0], [0, 17]], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
def test_tiles_and_edges(device: str, counts: list[int], dtype: torch.dtype, bound: float) -> None:
    M, D, F = sum(counts), 37, 21
    x, w = torch.randn(M, D, device=device).to(dtype), torch.randn(len(counts), F, D, device=device).to(dtype)
    dy, sizes = torch.randn(M, F, device=device).to(dtype), torch.tensor(counts, device=device)
    y = kernels.forward(x, w, sizes, blocks=(16, 16, 16))
    dw = kernels.outer(dy, x, sizes, blocks=(16, 16, 16))
    for ours, theirs in (
        (y, reference_forward(x.double(), w.double(), sizes)),
        (dw, reference_outer(dy.double(), x.double(), sizes)),
    ):
        assert (ours.double() - theirs).norm() <= bound * max(1.0, theirs.norm().item())


def test_through_the_operator(device: str) -> None:
    x = torch.randn(20, 8, device=device, requires_grad=True)
    w = torch.randn(3, 16, 8, device=device, requires_grad=True)
    dy = torch.randn(20, 16, device=device)
    wanted = torch.autograd.grad(grouped_gemm(x, w, [4, 0, 16], implementation="reference"), (x, w), dy)
    got = torch.autograd.grad(grouped_gemm(x, w, [4, 0, 16], implementation="triton"), (x, w), dy)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_as_one_product(device: str, kind: str) -> None:
    """Hidden layer and gradients against two products by the reference; the second expert has no row."""
    x = torch.randn(20, 8, device=device, requires_grad=True)
    gate, up = (torch.randn(3, 16, 8, device=device, requires_grad=True) for _ in range(2))
    counts, dy = torch.tensor([4, 0, 16]), torch.randn(20, 16, device=device)
    wanted = reference_gated_activation(
        *(grouped_gemm(x, w, counts, implementation="reference") for w in (gate, up)), kind
    )
    got = gate_up_hidden(x, gate, up, counts, kind, implementation="triton", activation_implementation="triton")
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, gate, up), dy) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
