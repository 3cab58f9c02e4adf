"""rope in Triton: one program turns some heads of one token; the backward is the rotation the other way."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from xscale_kernels.rows import wide


@triton.jit
def _kernel(
    x, cos, sin, y, T, H, K, sb, st, sh, sk, ab, at,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    ACC: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, time = token // T, token % T
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    pair = tl.arange(0, BR)
    angle = batch * ab + time * at + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(ACC)[None, :]
    if BACK:
        s = -s
    source = x + batch * sb + time * st + heads[:, None] * sh
    target = y + (token * H + heads[:, None]) * K
    if INTERLEAVED:
        # Rows are read and written whole and taken apart in registers: loads of every other channel are not vectorised.
        channel = tl.arange(0, 2 * BR)
        mask = (heads < H)[:, None] & (channel < 2 * HALF)[None, :]
        rows = tl.load(source + channel[None, :] * sk, mask=mask, other=0.0).to(ACC)
        a, b = tl.split(tl.reshape(rows, (BH, BR, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (BH, 2 * BR))
        tl.store(target + channel[None, :], turned.to(y.dtype.element_ty), mask=mask)
    else:
        mask = (heads < H)[:, None] & (pair < HALF)[None, :]
        a = tl.load(source + pair[None, :] * sk, mask=mask, other=0.0).to(ACC)
        b = tl.load(source + (HALF + pair)[None, :] * sk, mask=mask, other=0.0).to(ACC)
        tl.store(target + pair[None, :], (a * c - b * s).to(y.dtype.element_ty), mask=mask)
        tl.store(target + HALF + pair[None, :], (b * c + a * s).to(y.dtype.element_ty), mask=mask)
    if K > 2 * HALF:
        unrotated = 2 * HALF + tl.arange(0, BK)
        rest_mask = (heads < H)[:, None] & (unrotated < K)[None, :]
        value = tl.load(source + unrotated[None, :] * sk, mask=rest_mask, other=0.0)
        tl.store(target + unrotated[None, :], value, mask=rest_mask)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> torch.Tensor:
    B, T, H, K = x.shape
    y = x.new_empty(B, T, H, K)
    if y.numel() == 0:
        return y
    half = cos.shape[-1]
    # Enough heads for 4096 elements, so that a program is not all overhead.
    heads = min(triton.next_power_of_2(H), max(1, 4096 // triton.next_power_of_2(K)))
    _kernel[(B * T, triton.cdiv(H, heads))](
        x, cos, sin, y, T, H, K, *x.stride(), cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2),
        HALF=half, INTERLEAVED=interleaved, BACK=back,
        ACC=tl.float64 if wide(x.dtype) is torch.float64 else tl.float32,
        BH=heads, BR=triton.next_power_of_2(half), BK=triton.next_power_of_2(max(K - 2 * half, 1)),
    )  # fmt: skip
    return y


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, ctx.interleaved, True), None, None, None


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Triton implementation of `reference_rope`."""
    out: torch.Tensor = _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return out
