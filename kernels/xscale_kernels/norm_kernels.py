"""rmsnorm and layernorm in Triton: they differ by a mean and a bias.

Forward is one pass; backward is one pass and a short sum for the gradients of the weight and the bias.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from xscale_kernels.occupancy import programs_at_once
from xscale_kernels.rows import wide

MAX_WIDTH = 65536


@triton.jit
def _forward_kernel(
    x, weight, bias, y, means, scales, sn, D, eps,
    CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ACC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BD)
    mask = columns < D
    value = tl.load(x + row * sn + columns, mask=mask, other=0.0).to(ACC)
    if CENTRED:
        mean = tl.sum(value, 0) / D
        value = tl.where(mask, value - mean, 0.0)
        tl.store(means + row, mean)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(scales + row, scale)
    value *= scale
    if WEIGHTED:
        value *= tl.load(weight + columns, mask=mask, other=0.0).to(ACC)
    if BIASED:
        value += tl.load(bias + columns, mask=mask, other=0.0).to(ACC)
    tl.store(y + row * D + columns, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _read_row(
    dy,
    x,
    mean,
    scale,
    columns,
    mask,
    CENTRED: tl.constexpr,
    ACC: tl.constexpr,
    POLICY: tl.constexpr,
):
    """A row of the normalised input, without weight and bias, and of the gradient of the result."""
    unit = tl.load(x + columns, mask=mask, other=0.0, eviction_policy=POLICY).to(ACC)
    if CENTRED:
        unit = tl.where(mask, unit - mean, 0.0)
    return unit * scale, tl.load(dy + columns, mask=mask, other=0.0, eviction_policy=POLICY).to(ACC)


@triton.jit
def _backward_kernel(
    dy, x, weight, means, scales, dx, dweights, dbiases, N, sdn, sn, D, rows,
    CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, ACC: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BD)
    mask = columns < D
    if WEIGHTED and not WIDE:
        factor = tl.load(weight + columns, mask=mask, other=0.0).to(ACC)
    mean = 0.0
    dweight = tl.zeros((BD,), dtype=ACC)
    dbias = tl.zeros((BD,), dtype=ACC)
    for row in tl.range(program * rows, tl.minimum((program + 1) * rows, N), num_stages=STAGES):
        scale = tl.load(scales + row)
        if CENTRED:
            mean = tl.load(means + row)
        row_dy, row_x = dy + row * sdn, x + row * sn
        unit, g = _read_row(row_dy, row_x, mean, scale, columns, mask, CENTRED, ACC, "")
        if WIDE and CENTRED:
            # Beside the sums of the columns there are no registers for a row: its two sums come first, then it is read
            # again, from the caches.
            if WEIGHTED:
                g *= tl.load(weight + columns, mask=mask, other=0.0).to(ACC)
            along, across = tl.sum(g * unit, 0) / D, tl.sum(g, 0) / D
            unit, g = _read_row(
                row_dy, row_x, mean, scale, columns, mask, CENTRED, ACC, "evict_first"
            )
        if BIASED:
            dbias += g
        if WEIGHTED:
            dweight += g * unit
            if WIDE:
                factor = tl.load(
                    weight + columns, mask=mask, other=0.0, eviction_policy="evict_last"
                ).to(ACC)
            g *= factor
        if not (WIDE and CENTRED):
            along = tl.sum(g * unit, 0) / D
            if CENTRED:
                across = tl.sum(g, 0) / D
        out = g - unit * along
        if CENTRED:
            out -= across
        tl.store(dx + row * D + columns, (out * scale).to(dx.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(dweights + program * D + columns, dweight, mask=mask)
    if BIASED:
        tl.store(dbiases + program * D + columns, dbias, mask=mask)


def warps(D: int) -> int:
    """Warps of a row's program: 16 elements a thread, and always a power of two, as Triton requires."""
    return min(16, max(4, int(triton.next_power_of_2(D)) // 512))


def _options(
    D: int, scales: torch.dtype, *, centred: bool, weighted: bool, biased: bool
) -> dict[str, Any]:
    """Return the constants that the backward kernel is compiled for."""
    return {
        "CENTRED": centred,
        "WEIGHTED": weighted,
        "BIASED": biased,
        "ACC": tl.float64 if scales is torch.float64 else tl.float32,
        "BD": triton.next_power_of_2(D),
        "STAGES": 2 if D <= 8192 else 1,
        "WIDE": D > 8192,
        "num_warps": warps(D),
    }


@functools.lru_cache(maxsize=256)
def _programs(
    device: torch.device,
    D: int,
    dtypes: tuple[torch.dtype, ...],
    centred: bool,
    weighted: bool,
    biased: bool,
) -> int:
    """Programs of the backward launch: as many as are resident at once, so that none waits for a second wave.

    By the registers of the compiled kernel, before it is launched, so that the first sum of a weight's gradient has the
    order of all others. `dtypes` of dy, x, the weight and the scales.
    """
    if device.type != "cuda":
        return 3
    dy, x, weight, scales = (torch.empty(2, D, device=device, dtype=dtype) for dtype in dtypes)
    options = _options(D, dtypes[3], centred=centred, weighted=weighted, biased=biased)
    arguments = (dy, x, weight, scales, scales, x, scales, scales, 32, D, D, D, 16)
    kernel = _backward_kernel.warmup(*arguments, grid=(1,), **options)
    return programs_at_once(kernel, options["num_warps"], device)


class NormRows(torch.autograd.Function):
    """apply(x [N, D], weight [D] or None, bias [D] or None, eps, centred) -> [N, D] of x's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        centred: bool,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        weight, bias = (
            None if parameter is None else parameter.contiguous() for parameter in (weight, bias)
        )
        N, D = x.shape
        compute = wide(x.dtype)
        y = x.new_empty(N, D)
        means, scales = (
            x.new_empty(N if centred else 0, dtype=compute),
            x.new_empty(N, dtype=compute),
        )
        if N:
            _forward_kernel[(N,)](
                x, x if weight is None else weight, x if bias is None else bias, y, means, scales, x.stride(0), D, eps,
                CENTRED=centred, WEIGHTED=weight is not None, BIASED=bias is not None,
                ACC=tl.float64 if compute is torch.float64 else tl.float32, BD=triton.next_power_of_2(D),
                num_warps=warps(D),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, means, scales)
        ctx.centred, ctx.bias_dtype = centred, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, means, scales = ctx.saved_tensors
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        N, D = x.shape
        kind = {
            "centred": ctx.centred,
            "weighted": weight is not None,
            "biased": ctx.bias_dtype is not None,
        }
        dtypes = (dy.dtype, x.dtype, x.dtype if weight is None else weight.dtype, scales.dtype)
        programs = min(_programs(x.device, D, dtypes, **kind), max(N, 1))
        dx = x.new_empty(N, D)
        dweights = scales.new_empty(programs if weight is not None else 0, D)
        dbiases = scales.new_empty(programs if ctx.bias_dtype is not None else 0, D)
        _backward_kernel[(programs,)](
            dy, x, x if weight is None else weight, means, scales, dx, dweights, dbiases,
            N, dy.stride(0), x.stride(0), D, triton.cdiv(N, programs),
            **_options(D, scales.dtype, **kind),
        )  # fmt: skip
        dweight = None if weight is None else dweights.sum(0).to(weight.dtype)
        dbias = None if ctx.bias_dtype is None else dbiases.sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Triton implementation of `reference_rmsnorm`."""
    out: torch.Tensor = NormRows.apply(x.reshape(-1, x.shape[-1]), weight, None, eps, False)  # type: ignore[no-untyped-call]
    return out.view(x.shape)


def layernorm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Triton implementation of `reference_layernorm`."""
    out: torch.Tensor = NormRows.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps, True)  # type: ignore[no-untyped-call]
    return out.view(x.shape)
