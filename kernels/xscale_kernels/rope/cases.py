"""Test examples and benchmark cases of rope."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xscale_kernels.cases import Case, Example, Pick, forward_backward
from xscale_kernels.rope.op import IMPLEMENTATIONS, reference_rope, rope


def draw(pick: Pick) -> Example:
    """Heads that turn wholly or in part, halves or neighbours, angles for all sequences or for each."""
    B, T, H, half = pick.integer(1, 3), pick.integer(0, 9), pick.integer(1, 5), pick.integer(1, 6)
    unrotated, interleaved = pick.integer(0, 5), pick.choice(False, True)
    phase = pick.normal(*pick.choice((T, half), (B, T, half)))
    return Example(
        run=lambda x, c, s, implementation=None: rope(
            x, c, s, interleaved=interleaved, implementation=implementation
        ),
        exact=lambda x, c, s: reference_rope(x, c, s, interleaved),
        tensors=(pick.normal(B, T, H, 2 * half + unrotated),),
        given=(phase.cos(), phase.sin()),
    )


TESTS = ("test_pointwise",)


def cases(device: str) -> Iterator[Case]:
    """Queries of one layer, with half-split and interleaved pairs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, T, H, K = (8, 4096, 32, 128) if device == "cuda" else (4, 1024, 8, 64)
    phase = torch.randn(T, K // 2, device=device)
    for interleaved in (False, True):
        x = torch.randn(B, T, H, K, device=device, dtype=dtype, requires_grad=True)
        ways = forward_backward(
            lambda x, implementation, i=interleaved: rope(
                x, phase.cos(), phase.sin(), interleaved=i, implementation=implementation
            ),
            lambda x, i=interleaved: reference_rope(x, phase.cos(), phase.sin(), i),
            IMPLEMENTATIONS,
            (x,),
        )
        label = f"{B} x {T} x {H} x {K} {dtype} {'interleaved' if interleaved else 'half-split'}"
        yield Case(label, ways, bytes=4.0 * x.numel() * x.element_size())
