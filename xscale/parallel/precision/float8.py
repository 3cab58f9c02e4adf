"""Linear maps in float8 (Micikevicius et al. 2022) with dynamic scales, and in MXFP8 (Rouhani et al. 2023).

Both operands of a linear map, and in backward the gradient, are cast with a scale per tensor, per row or per block of
a row; accumulation and result have more bits. Each tp rank scales its own shard of a weight. `precision.float8_kernel`
chooses who multiplies: torch, torchao, or an emulation for devices without float8.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.linear import Linear
from xscale.nn.module import substitute
from xscale.parallel.config import Float8Scaling, PrecisionConfig
from xscale.parallel.precision.float8_matmul import SIZE_MULTIPLES, float8_product
from xscale.parallel.precision.float8_torchao import torchao_product

NEEDS = {"tensor": (8, 9), "row": (9, 0), "mx": (10, 0)}
"""Scaling -> minimal compute capability."""
SCALES = {
    "tensor": "a scale per tensor",
    "row": "a scale per row",
    "mx": "MXFP8, a scale per 32 elements of a row",
}
"""Scaling -> how messages call it."""
KERNELS: dict[str, Callable[[Tensor, Tensor, Float8Scaling], Tensor]] = {
    "torch": float8_product,
    "torchao": torchao_product,
    "emulated": lambda x, weight, scaling: float8_product(x, weight, scaling, emulated=True),
}
"""`precision.float8_kernel` -> the product x W^T [N, M] of x [N, K] and W [M, K]."""


def check(model: nn.Module, config: PrecisionConfig, path: str) -> list[Problem]:
    """Return problems of the setting; `unsupported_device` checks the hardware."""
    scaling, kernel = config.float8, config.float8_kernel
    if scaling is None:
        if kernel == "torch":
            return []
        what = f"is {kernel}, and float8 is null, so nothing is multiplied in float8"
        scalings = take("tensor", "row", "mx", key=f"{path}.float8")
        return [Problem(f"{path}.float8_kernel", what, choices=take("torch") + scalings)]
    problems = []
    if config.compute != "bfloat16":
        what = f"float8 matmuls return bfloat16, and compute is {config.compute}"
        choices = take(None) + take("bfloat16", key=f"{path}.compute")
        problems.append(Problem(f"{path}.float8", what, choices=choices))
    if scaling == "mx" and kernel == "torch":
        what = "float8_kernel=torch has a scale per tensor or per row, and float8 is mx"
        fix = "The kernel emulated shows the numerics on any device."
        problems.append(
            Problem(f"{path}.float8_kernel", what, fix, choices=take("torchao", "emulated"))
        )
    multiple = SIZE_MULTIPLES[scaling]
    if not any(_fits(linear.weight, scaling) for linear in float8_linears(model)):
        what = f"no linear map has sizes that {multiple} divides, so none can use float8"
        fix = f"Or take widths that {multiple} divides."
        problems.append(Problem(f"{path}.float8", what, fix, choices=take(None)))
    return problems


def unsupported_device(config: PrecisionConfig, device: torch.device) -> Problem | None:
    """Return why this device or installation has no such float8 matmul; None when it has."""
    scaling, kernel = config.float8, config.float8_kernel
    if scaling is None or kernel == "emulated":
        return None
    needed, gpu = NEEDS[scaling], device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if gpu else (0, 0)
    able = [other for other, minimum in NEEDS.items() if minimum <= capability]
    choices = take(*able, None) + take("emulated", key="precision.float8_kernel")
    fix = f"Or take a GPU of compute capability {needed[0]}.{needed[1]} or newer."
    if not gpu:
        what = f"a {device.type} does not support float8 matmuls"
        return Problem("precision.float8", what, fix, choices=choices)
    if capability < needed:
        what = f"a GPU of compute capability {capability[0]}.{capability[1]} does not support float8={scaling}"
        return Problem("precision.float8", what, fix, choices=choices)
    if kernel == "torchao" and importlib.util.find_spec("torchao") is None:
        other = take("emulated" if scaling == "mx" else "torch")
        fix = "Or run: pip install 'torchao>=0.18,<0.19'."
        return Problem("precision.float8_kernel", "torchao is not installed", fix, choices=other)
    return None


@dataclass(frozen=True)
class Float8Map:
    """Substitute for the matmul of a linear map."""

    scaling: Float8Scaling
    kernel: str
    """A key of KERNELS."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b [..., M] of x [..., K] and weight [M, K], in x's dtype.

        In x's dtype throughout where the sizes of the weight are no multiples of 16 (mx: 32).
        """
        if not _fits(weight, self.scaling):
            return F.linear(x, weight, bias)
        y = KERNELS[self.kernel](x.reshape(-1, x.shape[-1]), weight, self.scaling)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias


def apply(model: nn.Module, config: PrecisionConfig) -> str | None:
    """Substitute the matmul of each linear map, except experts, the head and modules that keep their precision.

    Return the line to log; None when float8 is not asked for.
    """
    scaling = config.float8
    if scaling is None:
        return None
    linears = float8_linears(model)
    for linear in linears:
        substitute(linear, "matmul", Float8Map(scaling, config.float8_kernel))
    by = {"torch": "", "torchao": ", by torchao", "emulated": ", emulated"}[config.float8_kernel]
    return f"Applied float8 matmuls, {SCALES[scaling]}{by}, to {len(linears)} linear maps"


def take_torch_kernel(model: nn.Module) -> None:
    """Substitute torch's matmul for torchao's, whose kernels take no tensors without numbers.

    It has the same float8 operands and products; MXFP8 is taken by rows, without the scales of its blocks, which are
    1/32 of the operands' bytes.
    """
    for linear in float8_linears(model):
        matmul = linear.matmul
        if isinstance(matmul, Float8Map) and matmul.kernel == "torchao":
            substitute(
                linear,
                "matmul",
                Float8Map("row" if matmul.scaling == "mx" else matmul.scaling, "torch"),
            )


def float8_linears(model: nn.Module) -> list[Linear]:
    """Return the linear maps that use float8."""
    return [
        module
        for module in model.modules()
        if isinstance(module, Linear) and not module.keeps_precision
    ]


def _fits(weight: Tensor, scaling: Float8Scaling) -> bool:
    return all(size % SIZE_MULTIPLES[scaling] == 0 for size in weight.shape)
