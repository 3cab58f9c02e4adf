"""The memory of equal calls of an operator: the first is traced inside, and the others are one event each."""

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor

from xscale.measure.op_tracer import OpTracer
from xscale_kernels.grouped_gemm.op import grouped_gemm
from xscale_kernels.linear_cross_entropy.op import linear_cross_entropy
from xscale_kernels.permute.op import permute

ROWS, WIDTH = 512, 64


def _experts(x: Tensor) -> Tensor:
    return grouped_gemm(x, torch.ones(4, 128, WIDTH), torch.tensor([ROWS // 4] * 4))


def _loss(x: Tensor) -> Tensor:
    return linear_cross_entropy(x, torch.ones(4096, WIDTH), torch.zeros(ROWS, dtype=torch.long))


def _gathered(x: Tensor) -> Tensor:
    return permute(x, torch.arange(ROWS).flip(0))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {"experts": _experts, "loss": _loss, "gathered": _gathered}


def _run(tracer: OpTracer, call: Callable[[Tensor], Tensor], rows: int = ROWS) -> tuple[int, int, int]:
    """Peak of forward and of backward above what was live before, and how many operators were dispatched."""
    x = torch.ones(rows, WIDTH, requires_grad=True)
    before, peaks = tracer.total, []
    count = len(tracer.workspaces)
    with tracer:
        tracer.mark("forward")
        out = call(x)
        peaks.append(tracer.segment.peak.total - before)
        tracer.mark("backward")
        out.sum().backward()
        peaks.append(tracer.segment.peak.total - before)
    return peaks[0], peaks[1], len(tracer.workspaces) - count


@pytest.mark.parametrize("name", CALLS)
def test_an_equal_call_takes_the_memory_of_the_traced_one(name: str) -> None:
    traced = _run(OpTracer(), CALLS[name])
    known: dict[Hashable, int] = {}
    first, second = (_run(OpTracer(workspaces=known), CALLS[name]) for _ in range(2))
    assert first == traced
    assert first[2] > 0
    assert second == (*traced[:2], 0)


def test_a_call_of_another_shape_is_traced_by_itself() -> None:
    known: dict[Hashable, int] = {}

    def square(x: Tensor) -> Tensor:
        return grouped_gemm(x, torch.ones(1, WIDTH, WIDTH), torch.tensor([len(x)]))

    assert _run(OpTracer(workspaces=known), square)[2] > 0
    assert _run(OpTracer(workspaces=known), square, 2 * ROWS)[2] > 0
