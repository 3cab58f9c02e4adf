"""Masks inside the blocks of a layout: of the future, of other documents, and of tokens that fill up a block."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.attention.ops.block_plan import TokenMasks, UnitChunk
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.compiling.eager import eager

PADDING_DOCUMENT = torch.iinfo(torch.int64).min
"""Document of the keys that pad the last block; no query is in it."""


@dataclass(frozen=True)
class DocumentMask:
    """Mask by document: a query sees the keys of its own document only."""

    queries: Tensor
    """[B, rows, Q]."""
    keys: Tensor
    """[B, columns, b]."""

    codes: tuple[Tensor, Tensor] | None = None
    """Queries' and keys' documents as numbers so far apart that the square of a difference is infinite."""

    @classmethod
    @eager
    def of(cls, queries: Tensor, keys: Tensor, accumulate_dtype: torch.dtype) -> "DocumentMask":
        """Build the mask; on a CPU, where a masked fill is slow, with `codes` if exact in `accumulate_dtype`.

        Not compiled: torch.compile would compile it anew for each number of documents.
        """
        if queries.is_cuda:
            return cls(queries, keys)
        known = keys[keys != PADDING_DOCUMENT]
        low = min(int(queries.min()), int(known.min())) if known.numel() else 0
        high = max(int(queries.max()), int(known.max())) if known.numel() else 0
        if (high - low + 1) * torch.finfo(accumulate_dtype).eps > 1:
            return cls(queries, keys)
        far = torch.finfo(accumulate_dtype).max ** 0.75
        codes = tuple(
            (x - low).masked_fill(x == PADDING_DOCUMENT, -1).to(accumulate_dtype).mul_(far)
            for x in (queries, keys)
        )
        return cls(queries, keys, (codes[0], codes[1]))

    def hide(self, scores: Tensor, chunk: UnitChunk) -> None:
        """Set scores of a chunk [U, Q, d*b] to -inf where query and key are in different documents."""
        batch, columns = chunk.batch[:, None], chunk.columns
        queries, keys = self.queries[chunk.batch, chunk.rows], self.keys[batch, columns].flatten(1)
        first = queries[:, :1]
        # A GPU hides nothing faster than the host learns that there is nothing to hide.
        if not queries.is_cuda and bool((queries == first).all()) and bool((keys == first).all()):
            return
        if self.codes is None:
            scores.masked_fill_(queries[:, :, None] != keys[:, None, :], float("-inf"))
            return
        query_codes, key_codes = self.codes
        difference = (
            query_codes[chunk.batch, chunk.rows][:, :, None]
            - key_codes[batch, columns].flatten(1)[:, None, :]
        )
        scores.addcmul_(difference, difference, value=-1)


@dataclass(frozen=True)
class InBlockMask:
    """Masks inside the blocks of the layout, besides the plan's tiles."""

    causal: Tensor | None = None
    """Float [Q, b], -inf where masked: the causal mask inside a unit's last key block, which is its own."""
    tail: int = 0
    """Keys of the last key block that are not padding; 0: all of them."""
    documents: DocumentMask | None = None
    token_masks: TokenMasks = ()
    """Evaluated at each call, for queries that are not whole blocks of the plan."""
    first_query: int = 0
    """Position of the first query, for `token_masks`."""


def pad_blocks(x: Tensor, dim: int, before: int, multiple: int, value: int = 0) -> Tensor:
    """Pad `dim` with `before` values at its start, and at its end up to a `multiple`."""
    after = -(before + x.shape[dim]) % multiple
    if not before and not after:
        return x
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), before, after), value=value)


def split_blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Split the axis `dim` into two axes, the second of length `size`."""
    return x.view(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def in_block_mask(
    q: Tensor, mask: AttentionMask, block: int, size: int, before: int
) -> InBlockMask:
    """Build the mask inside blocks of `size` queries, of which the first `before` are padding."""
    causal = None
    if mask.causal:
        position = (
            torch.arange(size, device=q.device)
            if size == block
            else q.new_full((1,), mask.offset % block)
        )
        future = torch.arange(block, device=q.device)[None, :] > position[:, None]  # [Q, b]
        dtype = torch.promote_types(q.dtype, torch.float32)
        causal = torch.zeros(future.shape, dtype=dtype, device=q.device).masked_fill_(
            future, float("-inf")
        )
    if mask.query_documents is None:
        return InBlockMask(causal, 0 if mask.causal else mask.keys % block)
    assert mask.key_documents is not None
    queries = split_blocks(pad_blocks(mask.query_documents.long(), 1, before, size), 1, size)
    keys = split_blocks(
        pad_blocks(mask.key_documents.long(), 1, 0, block, PADDING_DOCUMENT), 1, block
    )
    return InBlockMask(
        causal,
        documents=DocumentMask.of(queries, keys, torch.promote_types(q.dtype, torch.float32)),
    )
