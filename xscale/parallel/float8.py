"""Matrix products in float8 (Micikevicius et al. 2022), scaled when they are used: a setting for hardware that has it.

Both operands of a linear map, and in backward the gradient too, are cast with a scale of their own, for the whole
tensor or for each row; sums and the result stay wider. A rank of tp scales the part of a weight that it holds.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.nn.linear import Linear
from xscale.parallel.config import PrecisionConfig

MULTIPLE = 16
"""What must divide the sizes of a product."""
NEEDS = {"tensor": (8, 9), "row": (9, 0)}
"""The least compute capability of a GPU that multiplies so."""


def check(model: nn.Module, config: PrecisionConfig, path: str) -> list[Problem]:
    """Problems of the setting; the hardware is asked when there is one, by `refusal`."""
    if config.float8 is None:
        return []
    problems = []
    if config.compute != "bfloat16":
        what = f"products in float8 give bfloat16, and compute is {config.compute}"
        problems.append(Problem(f"{path}.float8", what, "Take compute=bfloat16, or float8=null."))
    if not any(_fits(one.weight) for one in linears(model)):
        what = f"{MULTIPLE} divides the sizes of no linear map, so none could be multiplied so"
        problems.append(Problem(f"{path}.float8", what, f"Take widths that {MULTIPLE} divides, or float8=null."))
    return problems


def refusal(config: PrecisionConfig, device: torch.device) -> Problem | None:
    """Why this device cannot do it."""
    if config.float8 is None:
        return None
    major, minor = NEEDS[config.float8]
    able = "tensor or null" if config.float8 == "row" else "null"
    fix = f"Take a GPU of compute capability {major}.{minor} or newer, or float8={able}."
    if device.type != "cuda":
        return Problem("precision.float8", f"a {device.type} does not multiply in float8", fix)
    found = torch.cuda.get_device_capability(device)
    if found < (major, minor):
        return Problem("precision.float8", f"a GPU of compute capability {found[0]}.{found[1]} cannot", fix)
    return None


def apply(model: nn.Module, config: PrecisionConfig) -> None:
    """Substitute the product of each linear map; experts, the head and what keeps its precision stay as they are."""
    if config.float8 is not None:
        for one in linears(model):
            one.multiply = partial(multiply, by_row=config.float8 == "row")


def linears(model: nn.Module) -> list[Linear]:
    """The linear maps that are multiplied so."""
    return [one for one in model.modules() if isinstance(one, Linear) and not one.keeps_precision]


def _fits(weight: Tensor) -> bool:
    return all(size % MULTIPLE == 0 for size in weight.shape)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, *, by_row: bool) -> Tensor:
    """x [..., K], weight [M, K] -> x W^T + b [..., M]; plainly where 16 does not divide the weight's sizes."""
    if not _fits(weight):
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _Product.apply(flat, weight, by_row)  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        context.save_for_backward(x, weight)
        context.by_row = by_row
        return product(x, weight, by_row=by_row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        x, weight = context.saved_tensors
        by_row: bool = context.by_row
        # With one scale a tensor gradients need the wider range; with one a row they do not (Micikevicius et al. 2022).
        kind = torch.float8_e4m3fn if by_row else torch.float8_e5m2
        to_x = product(gradient, weight.t(), by_row=by_row, kind=kind)
        missing = -len(x) % MULTIPLE
        rows, columns = (F.pad(one, (0, 0, 0, missing)).t() for one in (gradient, x))
        return to_x, product(rows, columns, by_row=by_row, kind=kind), None


def product(x: Tensor, other: Tensor, *, by_row: bool, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x [N, K] by other [M, K] -> x other^T [N, M], of x's dtype; x is cast to `kind`, the other to e4m3."""
    left, a = scaled(x, by_row=by_row, kind=kind)
    right, b = scaled(other, by_row=by_row, kind=torch.float8_e4m3fn)
    made: Tensor = torch._scaled_mm(left, right.t(), a, b.t() if by_row else b, out_dtype=x.dtype)
    return made


def scaled(x: Tensor, *, by_row: bool, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N, K] in `kind`, as large as it can be, and the scale that takes it back: [N, 1], or a scalar."""
    wide = x.float()
    most = wide.abs().amax(1, keepdim=True) if by_row else wide.abs().amax()
    scale = most.clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(kind).max
    # What is all zero has any scale.
    scale = scale.masked_fill(most == 0, 1.0)
    return (wide / scale).to(kind).contiguous(), scale
