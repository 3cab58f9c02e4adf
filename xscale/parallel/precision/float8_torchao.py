"""Float8 products by torchao 0.18: its recipes of float8 training, tensorwise and rowwise, and MXFP8.

tensorwise is the definition of `float8_matmul`. rowwise has the same formats, with scales that are powers of two.
MXFP8 is the definition, with scales that are rounded up (RCEIL). Names of torchao are imported in use, so that it is
needed only where it is chosen.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xscale.parallel.config import Float8Scaling
from xscale.parallel.precision.float8_matmul import BLOCK, pad_rows

RECIPES = {"tensor": "tensorwise", "row": "rowwise"}
"""Scaling -> torchao's recipe."""


def torchao_product(
    x: Tensor, weight: Tensor, scaling: Float8Scaling, *, emulated: bool = False
) -> Tensor:
    """Return x W^T [N, M] of x [N, K] and weight [M, K], in x's dtype, with gradients that are float8 products too.

    `emulated`: torchao multiplies on a CPU what float8 stands for, which tests compare with the definition.
    """
    # The gradient of the weight sums over rows, which torchao takes in multiples; it does not pad MXFP8's.
    padded = pad_rows(x, scaling).contiguous()
    y = (
        _mxfp8(padded, weight.contiguous(), emulated)
        if scaling == "mx"
        else _float8(padded, weight, scaling, emulated)
    )
    return y[: len(x)]


def _float8(x: Tensor, weight: Tensor, scaling: Float8Scaling, emulated: bool) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config, products = _configs(RECIPES[scaling], emulated)
    y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)
    return y


@functools.lru_cache(maxsize=4)
def _configs(recipe: str, emulated: bool) -> tuple[Any, Any]:
    """Return torchao's config of a linear map and that of its three products."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    return config, LinearMMConfig(
        *(ScaledMMConfig(emulated, gemm.use_fast_accum, False, False) for gemm in gemms)
    )


def _mxfp8(x: Tensor, weight: Tensor, emulated: bool) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kind = torch.float8_e4m3fn
    y: Tensor = mx_mm.apply(
        x,
        weight,
        kind,
        kind,
        kind,
        BLOCK,
        KernelPreference.EMULATED if emulated else KernelPreference.AUTO,
        MXFP8Dim0CastKernelChoice.TORCH if emulated else MXFP8Dim0CastKernelChoice.TRITON,
        MXFP8Dim1CastKernelChoice.TORCH if emulated else MXFP8Dim1CastKernelChoice.CUDA,
        ScaleCalculationMode.RCEIL,
        False,
    )
    return y
