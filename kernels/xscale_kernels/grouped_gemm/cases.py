"""Test examples and benchmark cases of grouped_gemm."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.grouped_gemm.op import IMPLEMENTATIONS, grouped_gemm, reference_grouped_gemm


def draw(pick: Pick) -> Example:
    """Groups of any size, some empty, with widths that are and are not multiples of 8."""
    counts = torch.tensor(
        [pick.choice(0, pick.integer(1, 9), 33) for _ in range(pick.integer(1, 5))]
    )
    D, F = pick.choice(pick.integer(1, 20), 32), pick.choice(pick.integer(1, 20), 16)
    return Example(
        run=lambda x, w, c, implementation=None: grouped_gemm(
            x, w, c, implementation=implementation
        ),
        exact=reference_grouped_gemm,
        tensors=(pick.normal(int(counts.sum()), D), pick.normal(len(counts), F, D)),
        given=(counts,),
        slack=2.0,
        products=True,
    )


TESTS = ("test_grouped_gemm",)


def cases(device: str) -> Iterator[Case]:
    """Few large experts and many small ones, with unbalanced loads; "eager" is F.linear in a loop."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cuda, cpu = (
        ((32768, 4096, 14336, 8), (32768, 4096, 14336, 8), (65536, 2048, 1408, 64)),
        ((64, 32, 64, 4), (2048, 256, 512, 8), (4096, 256, 256, 64)),
    )
    for number, (M, D, F, E) in enumerate(cuda if device == "cuda" else cpu):
        x = torch.randn(M, D, device=device, dtype=dtype, requires_grad=True)
        weights = (torch.randn(E, F, D, device=device, dtype=dtype) * D**-0.5).requires_grad_()
        # The first on a GPU is balanced: cuBLAS in a loop is then the bound.
        load = torch.ones(E) if device == "cuda" and number == 0 else torch.rand(E).add_(0.5)
        counts = (load / load.sum() * M).long()
        counts[-1] += M - counts.sum()
        ways = forward_backward(
            lambda x, w, c, implementation: grouped_gemm(x, w, c, implementation=implementation),
            reference_grouped_gemm,
            IMPLEMENTATIONS,
            (x, weights, counts.to(device)),
        )
        label = f"M={M} D={D} F={F} E={E} counts {int(counts.min())} to {int(counts.max())} {dtype}"
        yield Case(label, ways, flops=6.0 * M * D * F, at={"experts": E})
