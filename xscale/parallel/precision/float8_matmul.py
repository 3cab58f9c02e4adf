"""Float8 products: the casts, with a scale per tensor, per row or per block of a row, and their gradients.

e4m3 and e5m2 are of Micikevicius et al. 2022. MXFP8 (Rouhani et al. 2023; OCP Microscaling Formats 1.0) has a scale
for each 32 elements of a row, which is a power of two of 8 bits (e8m0). As Mishra et al. 2025 pre-train with it, all
operands are e4m3, blocks lie along the dimension that is summed, and a scale is rounded up, so that nothing saturates.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.mesh.torch_private import scaled_mm
from xscale.parallel.config import Float8Scaling

BLOCK = 32
"""Elements of a row with one scale in MXFP8."""
SIZE_MULTIPLES = {"tensor": 16, "row": 16, "mx": BLOCK}
"""Scaling -> what divides all sizes of a product."""
LOWEST_EXPONENT, HIGHEST_EXPONENT = -127, 127
"""Exponents of the scales of e8m0."""


def float8_product(
    x: Tensor, weight: Tensor, scaling: Float8Scaling, *, emulated: bool = False
) -> Tensor:
    """Return x W^T [N, M] of x [N, K] and weight [M, K], in x's dtype, with gradients that are float8 products too.

    `emulated`: the products are of the numbers that float8 stands for, in float32, on any device.
    """
    y: Tensor = _Float8Product.apply(x, weight, scaling, emulated)  # type: ignore[no-untyped-call]
    return y


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, scaling: Float8Scaling, emulated: bool
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.scaling, context.emulated = scaling, emulated
        return float8_matmul(x, weight, scaling, emulated=emulated)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        x, weight = context.saved_tensors
        scaling: Float8Scaling = context.scaling
        # With a scale per tensor gradients need e5m2's range; with finer ones they do not (Micikevicius et al. 2022).
        kind = torch.float8_e5m2 if scaling == "tensor" else torch.float8_e4m3fn
        to_x = float8_matmul(gradient, weight.t(), scaling, kind=kind, emulated=context.emulated)
        rows, columns = (pad_rows(matrix, scaling).t() for matrix in (gradient, x))
        to_weight = float8_matmul(rows, columns, scaling, kind=kind, emulated=context.emulated)
        return to_x, to_weight, None, None


def pad_rows(matrix: Tensor, scaling: Float8Scaling) -> Tensor:
    """Append rows of zeros to [N, K], up to a multiple of what a product over the rows needs."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % SIZE_MULTIPLES[scaling]))


def float8_matmul(
    x: Tensor,
    other: Tensor,
    scaling: Float8Scaling,
    *,
    kind: torch.dtype = torch.float8_e4m3fn,
    emulated: bool = False,
) -> Tensor:
    """Return x other^T [N, M] of x [N, K] and other [M, K], in x's dtype; x is cast to `kind`, other to e4m3.

    The scaling "mx" is only emulated.
    """
    left, a = quantize(x, scaling, kind)
    right, b = quantize(other, scaling, torch.float8_e4m3fn)
    if emulated:
        return (dequantize(left, a) @ dequantize(right, b).t()).to(x.dtype)
    assert scaling != "mx", "torch's product has a scale per tensor or per row"
    result: Tensor = scaled_mm(
        left, right.t(), a, b.t() if scaling == "row" else b, out_dtype=x.dtype
    )
    return result


def quantize(x: Tensor, scaling: Float8Scaling, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [N, K] to `kind`; return it with the float32 scales that multiply it back.

    They are a scalar, [N, 1] per row, or [N, K / 32] of blocks.
    """
    x32 = x.float()
    if scaling == "mx":
        blocks = x32.reshape(len(x), -1, BLOCK)
        scales = _block_scales(blocks.abs().amax(-1, keepdim=True), kind)
        return (blocks / scales).view(x.shape).to(kind).contiguous(), scales.squeeze(-1)
    largest = x32.abs().amax(1, keepdim=True) if scaling == "row" else x32.abs().amax()
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(kind).max
    # All-zero values have any scale.
    scale = scale.masked_fill(largest == 0, 1.0)
    return (x32 / scale).to(kind).contiguous(), scale


def _block_scales(largest: Tensor, kind: torch.dtype) -> Tensor:
    """Return the least powers of two of e8m0 with which `largest`, of each block, does not exceed the range of `kind`.

    An infinity or NaN gives a block of NaN.
    """
    mantissa, exponent = torch.frexp(largest / torch.finfo(kind).max)
    # largest = mantissa * 2^exponent with a mantissa from [0.5, 1): a power of two itself has 0.5.
    rounded_up = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(
        LOWEST_EXPONENT, HIGHEST_EXPONENT
    )
    scales = torch.ldexp(torch.ones_like(largest), rounded_up)
    return scales.masked_fill(~largest.isfinite(), torch.nan)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 numbers [N, K] that float8 `values` [N, K] with the scales of `quantize` stand for."""
    if scales.dim() < 2 or scales.shape[1] == 1:
        return values.float() * scales
    return (values.float().view(len(values), -1, BLOCK) * scales.unsqueeze(-1)).view(values.shape)
