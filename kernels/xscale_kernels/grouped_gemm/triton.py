"""grouped_gemm in Triton: the map from tile to (group, first row) is built on the device, without a host sync."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

Blocks = tuple[int, int, int]


@triton.jit
def _product_kernel(
    x, w, y, tile_group, tile_row, ends, tiles, E, F, D, sxm, sxd, swe, swf, swd,
    BM: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    # Programs that run at once take NEAR neighbouring row tiles, so that they share a weight's columns in the L2 cache.
    band = NEAR * tl.cdiv(F, BF)
    first_tile = tl.program_id(0) // band * NEAR
    near = tl.minimum(tiles - first_tile, NEAR)
    tile, column = first_tile + tl.program_id(0) % band % near, tl.program_id(0) % band // near
    group = tl.load(tile_group + tile)
    # The grid is an upper bound made without reading the counts; tiles past the last group return at once.
    if group < E:
        rows = tl.load(tile_row + tile) + tl.arange(0, BM)  # [BM] int64
        row_mask = rows < tl.load(ends + group)
        columns = column.to(tl.int64) * BF + tl.arange(0, BF)
        column_mask = columns < F
        depth = tl.arange(0, BD)
        x_at = x + rows[:, None] * sxm + depth[None, :] * sxd
        w_at = w + group * swe + columns[None, :] * swf + depth[:, None] * swd
        total = tl.zeros((BM, BF), dtype=ACC)
        for start in range(0, D, BD):
            depth_mask = depth < D - start
            left = tl.load(x_at, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            right = tl.load(w_at, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
            total += tl.dot(left, right, input_precision=PRECISION, out_dtype=ACC)
            x_at += BD * sxd
            w_at += BD * swd
        out_at = y + rows[:, None] * F + columns[None, :]
        tl.store(
            out_at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :]
        )


@triton.jit
def _outer_kernel(
    dy, x, dw, ends, F, D, sym, syf, sxm, sxd,
    BM: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group)
    columns = tl.program_id(1).to(tl.int64) * BF + tl.arange(0, BF)
    depth = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)
    column_mask, depth_mask = columns < F, depth < D
    total = tl.zeros((BF, BD), dtype=ACC)
    # An empty group runs no step and writes zeros.
    for start in range(first, last, BM):
        rows = start + tl.arange(0, BM)
        row_mask = rows < last
        left = tl.load(
            dy + rows[None, :] * sym + columns[:, None] * syf,
            mask=column_mask[:, None] & row_mask[None, :],
            other=0.0,
        )
        right = tl.load(
            x + rows[:, None] * sxm + depth[None, :] * sxd,
            mask=row_mask[:, None] & depth_mask[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision=PRECISION, out_dtype=ACC)
    out_at = dw + group * F * D + columns[:, None] * D + depth[None, :]
    tl.store(out_at, total.to(dw.dtype.element_ty), mask=column_mask[:, None] & depth_mask[None, :])


def _arithmetic(dtype: torch.dtype) -> dict[str, object]:
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": precision, "ACC": tl.float64 if dtype is torch.float64 else tl.float32}


def _blocks(rows: int, groups: int) -> Blocks:
    # Small groups would leave most of a tall tile empty.
    return (128, 128, 64) if rows >= 96 * max(groups, 1) else (64, 128, 64)


def forward(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, blocks: Blocks | None = None
) -> torch.Tensor:
    """Triton `reference_forward`. blocks: tile sizes over (M, F, D), powers of two of at least 16."""
    (M, D), (E, F) = x.shape, weights.shape[:2]
    y = x.new_empty(M, F)
    if y.numel() == 0:
        return y
    BM, BF, BD = blocks or _blocks(M, E)
    ends = counts.cumsum(0)  # [E]
    tiles = (counts + BM - 1).div(BM, rounding_mode="floor")
    tile_ends = tiles.cumsum(0)
    tile = torch.arange(triton.cdiv(M, BM) + E, device=x.device)
    group = torch.searchsorted(tile_ends, tile, right=True)
    inside = group.clamp(max=E - 1)
    row = (ends - counts)[inside] + (tile - (tile_ends - tiles)[inside]) * BM
    _product_kernel[(triton.cdiv(F, BF) * tile.shape[0],)](
        x, weights, y, group, row, ends, tile.shape[0], E, F, D, *x.stride(), *weights.stride(),
        BM=BM, BF=BF, BD=BD, NEAR=8, **_arithmetic(x.dtype), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


def outer(
    dy: torch.Tensor, x: torch.Tensor, counts: torch.Tensor, blocks: Blocks | None = None
) -> torch.Tensor:
    """Triton `reference_outer`. blocks: tile sizes over (M, F, D)."""
    E, F, D = counts.shape[0], dy.shape[1], x.shape[1]
    dw = x.new_empty(E, F, D)
    if dw.numel() == 0:
        return dw
    BM, BF, BD = blocks or (64, 128, 128)
    _outer_kernel[(triton.cdiv(D, BD), triton.cdiv(F, BF), E)](
        dy, x, dw, counts.cumsum(0), F, D, *dy.stride(), *x.stride(),
        BM=BM, BF=BF, BD=BD, **_arithmetic(x.dtype), num_warps=8, num_stages=3,
    )  # fmt: skip
    return dw
