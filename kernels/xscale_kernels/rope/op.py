"""rope (Su et al. 2021): pairs of channels rotated by an angle that grows with the position."""

from __future__ import annotations

import torch

from xscale_kernels import refusals
from xscale_kernels.rows import wide
from xscale_kernels.select import Implementation, choose, is_small_call, use_reference


def reference_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates the first R channels of each head in pairs; computed in float32 at least. Shapes as in `rope`."""
    R = 2 * cos.shape[-1]
    if x.shape[-1] > R:
        return torch.cat((reference_rope(x[..., :R], cos, sin, interleaved), x[..., R:]), -1)
    compute = wide(x.dtype)
    cos, sin = (
        cos.to(compute).unsqueeze(-2),
        sin.to(compute).unsqueeze(-2),
    )  # [T, 1, R / 2] or [B, T, 1, R / 2]
    turned = x.to(compute)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return out.to(x.dtype)


_HERE = "xscale_kernels.rope"
IMPLEMENTATIONS = (
    Implementation("cpu", f"{_HERE}.cpu", refusals.unless_cpu, refusals.unless_large),
    Implementation("triton", f"{_HERE}.triton", refusals.unless_triton),
    Implementation("reference", f"{_HERE}.op", refusals.never, prefix="reference_"),
)


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Channel pairs (a, b) become (a cos - b sin, b cos + a sin); channels past the angles are copied.

    x: [B, T, H, K]. cos, sin: [T, R / 2], or [B, T, R / 2] where positions differ by sequence, with R <= K even; they
    get no gradient. interleaved: pairs are (0, 1), (2, 3), ... (the paper, GPT-J); otherwise channel i is paired with
    i + R / 2 (GPT-NeoX, Llama). Computed in float32 at least; returns x's shape and dtype.

    Raises ValueError for shapes that do not fit, UnusableError when the named implementation refuses.
    """
    if x.dim() != 4 or cos.shape != sin.shape or cos.shape[:-1] not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            "rope takes x [B, T, H, K] and cos, sin of one shape, [T, R / 2] or [B, T, R / 2], got "
            f"{[*x.shape]}, {[*cos.shape]}, {[*sin.shape]}"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"the angles rotate {2 * cos.shape[-1]} channels, a head has {x.shape[-1]}"
        )
    if use_reference(implementation):
        return reference_rope(x, cos, sin, interleaved)
    if is_small_call(implementation, x):
        return reference_rope(x, cos, sin, interleaved)
    choice = choose("rope", IMPLEMENTATIONS, implementation, x)
    out: torch.Tensor = choice.implementation.function("rope")(x, cos, sin, interleaved)
    return out
