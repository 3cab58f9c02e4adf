"""Parts and inputs for the checks: small, in float64, with every weight off its start."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from xscale.core.registry import Entry
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.module import Module, name_modules
from xscale.nn.tokens import Tokens

NOISE: dict[str, Any] = {"dropout": 0.1, "expert_dropout": 0.1, "jitter": 0.1, "redraw": True}
"""Field of a config -> the value that switches its noise on."""
LENGTH = 300
"""Tokens: more than chunks of usual sizes hold, and a multiple of none."""
WIDTH = 32
HEADS = 4
HEAD_WIDTH = 8
VOCABULARY = 40
M = TypeVar("M", bound=Module)


def example(entry: Entry[Any]) -> Any:
    """A config of the part for sizes of tens: its own `example()` where the defaults are made for thousands."""
    return getattr(entry.part, "example", entry.part.Config)()


def dims(**changes: Any) -> Dims:
    """The model around a part."""
    usual: dict[str, Any] = {
        "width": WIDTH,
        "depth": 2,
        "vocabulary": VOCABULARY,
        "length": LENGTH,
        "causal": True,
    }
    return Dims(**{**usual, **changes})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ready(module: M) -> M:
    """Named, in float64, in evaluation, and with weights large enough that each of them shows."""
    name_modules(module)
    materialize(module, 0, dtype=torch.float64)
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.add_(drawn(*parameter.shape, seed=1000 + at), alpha=0.3)
    module.eval()
    return module


def fitting(entry: Entry[Any], dims: Any) -> Any:
    """The part's example config, which must have no problem within `dims`."""
    config = example(entry)
    problems = entry.part.check(config, dims, entry.name)
    assert problems == [], [str(problem) for problem in problems]
    return config


def noisy(config: Any) -> Any:
    """The config with its fields of noise switched on."""
    fields = type(config).model_fields
    return config.model_copy(
        update={name: value for name, value in NOISE.items() if name in fields}
    )


def core(entry: Entry[Any], *, heads: int = HEADS, noise: bool = False, **changes: Any) -> Core:
    """The part in evaluation; with `noise` in training, with its noise on."""
    around = dims(**changes)
    config = fitting(entry, around)
    part: Core = entry.part(noisy(config) if noise else config, around, heads, HEAD_WIDTH)
    return ready(part).train(noise)


def qkv(
    queries: int = LENGTH, keys: int | None = None, heads: int = HEADS, groups: int = HEADS
) -> list[Tensor]:
    """q [2, H, T, K], k and v [2, G, S, K], strided as projections leave them."""
    shapes = [(queries, heads), (keys or queries, groups), (keys or queries, groups)]
    return [
        drawn(2, length, count, HEAD_WIDTH, seed=at).transpose(1, 2)
        for at, (length, count) in enumerate(shapes)
    ]


def run(
    core: Core,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    **changes: Any,
) -> Tensor:
    """The core's output, with torch's generator at the same place each time."""
    usual: dict[str, Any] = {"queries": q.shape[2], "keys": k.shape[2], "causal": core.causal}
    torch.default_generator.manual_seed(0)
    out: Tensor = core(q, k, v, AttentionMask(**{**usual, **changes}) if mask is None else mask)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    return out


def other_from(x: Tensor, cut: int, dim: int = 2) -> Tensor:
    """`x` with other numbers at and behind place `cut` of `dim`."""
    changed = x.clone()
    changed.narrow(dim, cut, x.shape[dim] - cut).add_(
        drawn(*changed.narrow(dim, cut, x.shape[dim] - cut).shape, seed=7)
    )
    return changed


def tokens(
    length: int = LENGTH, batch: int = 2, documents: Tensor | None = None, **fields: Any
) -> Tokens:
    ids = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))
    return Tokens.from_ids(ids, documents, **fields)


def numbered(*lengths: int, batch: int = 2) -> Tensor:
    """Document numbers [B, T] of documents of those lengths."""
    numbers = [torch.full((length,), at) for at, length in enumerate(lengths)]
    return torch.cat(numbers).expand(batch, -1).contiguous()


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-9, atol=1e-11)


def gradients_of(
    loss: Tensor, inputs: list[Tensor], *, retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of a loss; zeros for inputs that a part does not read."""
    return torch.autograd.grad(
        loss, inputs, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )


def slope_fits(function: Any, inputs: list[Tensor]) -> bool:
    """Whether the gradients of `function` (to a tensor) fit a central difference in a random direction."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    weights = drawn(*function(*inputs).shape, seed=11)
    gradients = gradients_of((function(*inputs) * weights).sum(), inputs)
    for at, gradient in enumerate(gradients):
        direction = drawn(*gradient.shape, seed=20 + at)
        derivative = (gradient * direction).sum()
        # A long step straddles kinks and bends, a short one drowns in rounding: a right slope fits one of them.
        slopes = (
            _difference(function, inputs, at, direction, weights, step)
            for step in (1e-5, 1e-6, 1e-7, 1e-8)
        )
        if not any(
            torch.isclose(measured, derivative, rtol=1e-5, atol=1e-6) for measured in slopes
        ):
            return False
    return True


def _difference(
    function: Any, inputs: list[Tensor], at: int, direction: Tensor, weights: Tensor, step: float
) -> Tensor:
    """The slope of the weighted output along `direction` of input `at`."""
    with torch.no_grad():
        ends = [
            (
                function(
                    *[x + sign * step * direction if j == at else x for j, x in enumerate(inputs)]
                )
                * weights
            ).sum()
            for sign in (1, -1)
        ]
    slope: Tensor = (ends[0] - ends[1]) / (2 * step)
    return slope
