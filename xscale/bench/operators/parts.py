"""Times of parts of operators that no case shows by itself: xscale bench parts

The kernel of the keys' and values' gradients over a window of blocks, and over the window and a first column that all
rows see; and the part of a product's time that the accumulation of a weight's gradient takes outside of the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from xscale.bench.harness.timing import milliseconds
from xscale.core.errors import ConfigError
from xscale_kernels import torch_private
from xscale_kernels.block_sparse_attention.cases import window
from xscale_kernels.block_sparse_attention.layout import BlockLayout, layout_from_mask
from xscale_kernels.block_sparse_attention.op import ScoreModifier
from xscale_kernels.select import implementations

Calls = dict[str, Callable[[], object]]


def backward_of_columns(
    device: str, T: int = 32768, heads: int = 32, K: int = 128, kv_heads: int = 8
) -> Calls:
    """Backward over a window, with and without a column that all rows see, with as many and with fewer kv heads."""
    name = "triton" if device == "cuda" else "cpu"
    module = next(
        entry for entry in implementations("block_sparse_attention") if entry.name == name
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rule = ScoreModifier(K**-0.5, True)
    calls = Calls()
    for groups in (heads, kv_heads):
        q, out = (torch.randn(1, heads, T, K, device=device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(1, groups, T, K, device=device, dtype=dtype) for _ in range(2))
        lse = torch.zeros(1, heads, T, device=device)
        for block in (64, 128):
            mask = window(T // block, 512 // block)
            alone = mask.clone()
            alone[:, 512 // block :, 0] = False
            for label, blocks in (("window", alone), ("window and first column", mask)):
                layout: BlockLayout = layout_from_mask(blocks.to(device), block)
                calls[f"{label}, block {block}, {groups} kv heads"] = partial(
                    module.function("backward"), q, k, v, out, lse, out, layout, rule
                )
    return calls


def accumulation(device: str, N: int = 8192, V: int = 131072, D: int = 4096) -> Calls:
    """A weight's gradient by chunk: accumulated within the product (CUDA only), and by an addition after it."""
    dtype, calls = torch.bfloat16 if device == "cuda" else torch.float32, Calls()
    total = torch.zeros(V, D, device=device)
    for chunk in (512, 2048, 4096):
        dlogits, rows = (
            torch.randn(chunk, V, device=device).to(dtype),
            torch.randn(chunk, D, device=device).to(dtype),
        )

        def added(
            dlogits: torch.Tensor = dlogits, rows: torch.Tensor = rows, chunk: int = chunk
        ) -> None:
            for _ in range(N // chunk):
                total.add_(torch.mm(dlogits.t(), rows))

        def within(
            dlogits: torch.Tensor = dlogits, rows: torch.Tensor = rows, chunk: int = chunk
        ) -> None:
            for _ in range(N // chunk):
                torch_private.accumulate_product_(total, dlogits.t(), rows, 1.0)

        calls[f"chunk {chunk}, added"] = added
        if device == "cuda":
            calls[f"chunk {chunk}, within"] = within
    return calls


def part_times() -> dict[str, float]:
    """Return the milliseconds of each part; ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "parts",
            "they are timed on a GPU, and torch finds none",
            "Run it on a machine with a GPU.",
        )
    times: dict[str, float] = {}
    for group in (backward_of_columns, accumulation):
        times |= milliseconds(group("cuda"), "cuda")
        torch.cuda.empty_cache()
    return times
