"""linear_cross_entropy a chunk of tokens at a time in torch: one block of logits is computed, used and overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from xscale_kernels import torch_private
from xscale_kernels.cross_entropy.inplace import fold_, gradient_, refold_
from xscale_kernels.cross_entropy.op import LossTerms


class Gradients(NamedTuple):
    """Gradients of sum(seed * loss), each of its input's dtype."""

    hidden: torch.Tensor
    """[N, D]."""
    weight: torch.Tensor
    """[V, D]."""
    bias: torch.Tensor | None
    """[V], or None where there is no bias."""


SLAB_BYTES = 2**28
"""Size in float32 of one slab of the weight's gradient."""


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Dtype of the products. On CPU half precision is slower than float32 and rounds the logits: all is in float32."""
    return (
        torch.promote_types(weight.dtype, torch.float32)
        if weight.device.type == "cpu"
        else weight.dtype
    )


class ChunkedProjection:
    """The output projection in compute dtype, the buffer of a chunk's logits, and the accumulated gradients.

    The weight's gradient is summed over chunks in float32 inside the products. In half precision it is held in slabs of
    the vocabulary, so that at its end each slab is narrowed and freed before the next: the whole gradient exists in one
    precision at a time.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, chunk: int) -> None:
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.compute = compute_dtype(weight)
        self.weight = weight.to(self.compute)
        self.bias = None if bias is None else bias.to(self.compute)
        self.block: torch.Tensor | None = weight.new_empty(
            chunk, weight.shape[0], dtype=self.compute
        )  # [chunk, V]
        self.dweight: list[torch.Tensor] = []
        self.dbias: torch.Tensor | None = None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [chunk, V] of rows [chunk, D], in the buffer's memory and compute dtype."""
        assert self.block is not None
        block = self.block[: rows.shape[0]]
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=block)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=block)
        return block

    def back(
        self, dlogits: torch.Tensor, rows: torch.Tensor, drows: torch.Tensor, only: bool
    ) -> None:
        """Write the rows' gradient to drows; accumulate the weight's and the bias's. only: there is no other chunk."""
        narrow = dlogits.to(self.compute)
        if drows.dtype == self.compute:
            torch.mm(narrow, self.weight, out=drows)
        else:
            drows.copy_(torch.mm(narrow, self.weight))
        if self.compute == self.wide or only:
            # A single product accumulates in float32 by itself.
            if self.dweight:
                self.dweight[0].addmm_(narrow.t(), rows)
            else:
                self.dweight = [torch.mm(narrow.t(), rows)]
        else:
            self._add_slabs(narrow, rows)
        dbias = None if self.bias is None else dlogits.sum(0, dtype=self.wide)
        self.dbias = dbias if dbias is None or self.dbias is None else self.dbias.add_(dbias)

    def _add_slabs(self, dlogits: torch.Tensor, rows: torch.Tensor) -> None:
        slabs = torch.split(dlogits, max(1, SLAB_BYTES // (4 * rows.shape[1])), dim=1)
        beta = 1.0 if self.dweight else 0.0
        if not self.dweight:
            self.dweight = [
                rows.new_empty(slab.shape[1], rows.shape[1], dtype=self.wide) for slab in slabs
            ]
        for total, slab in zip(self.dweight, slabs, strict=True):
            torch_private.accumulate_product_(total, slab.t(), rows, beta)

    def gradients(
        self, drows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Gradients:
        """Return the accumulated gradients in their inputs' dtypes; the projection cannot be used afterwards."""
        self.block = None
        if not self.dweight:
            return Gradients(
                drows, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
            )
        dbias = None if bias is None or self.dbias is None else self.dbias.to(bias.dtype)
        slabs = self.dweight
        for at, slab in enumerate(slabs):
            # The assignment frees the slab in float32.
            slabs[at] = slab.to(weight.dtype)
            del slab
        dweight = slabs[0] if len(slabs) == 1 else torch.cat(slabs)
        return Gradients(drows, dweight, dbias)


def kept_tokens(targets: torch.Tensor, terms: LossTerms) -> torch.Tensor | None:
    """Indices of the tokens that are not ignored, on CPU; None for all (on a GPU the check would synchronise)."""
    if targets.device.type != "cpu":
        return None
    mask = targets != terms.ignore_index
    return None if bool(mask.all()) else mask.nonzero()[:, 0]


def spans(N: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, N)) for start in range(0, N, chunk))


Turn = Callable[[torch.Tensor, slice], torch.Tensor | None]
"""(logits [chunk, V], tokens) -> the gradient of the logits, possibly in place; None if none is needed."""


def sweep(
    projection: ChunkedProjection, hidden: torch.Tensor, chunk: int, turn: Turn
) -> torch.Tensor:
    """Compute each chunk's logits, turn them into gradients and backpropagate at once. Returns hidden's gradient.

    The implementations differ in `turn` alone.
    """
    drows = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    for span in spans(hidden.shape[0], chunk):
        rows = hidden[span].to(projection.compute)
        dlogits = turn(projection.logits(rows), span)
        if dlogits is not None:
            projection.back(dlogits, rows, drows[span], only=hidden.shape[0] <= chunk)
    return drows


def placed(values: torch.Tensor, kept: torch.Tensor | None, N: int) -> torch.Tensor:
    """Scatter rows to the tokens `kept`, zeros elsewhere."""
    return (
        values
        if kept is None
        else values.new_zeros(N, *values.shape[1:]).index_copy_(0, kept, values)
    )


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    seed: torch.Tensor | None,
    terms: LossTerms,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, Gradients | None]:
    """Each token's loss [N] and lse [N]; with a seed [N] also the gradients of sum(seed * loss), in the same pass."""
    N, kept = hidden.shape[0], kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        seed = None if seed is None else seed.index_select(0, kept)
    mask = targets != terms.ignore_index
    safe = targets.where(mask, 0)
    projection = ChunkedProjection(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    seed = None if seed is None else seed.to(projection.wide) * mask
    loss, lse = (hidden.new_empty(hidden.shape[0], dtype=projection.wide) for _ in range(2))

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor | None:
        block = logits.to(projection.wide)
        folded = fold_(block, safe[span], terms)
        loss[span], lse[span] = folded.loss, folded.lse
        return None if seed is None else gradient_(block, folded, safe[span], seed[span], terms)

    drows = sweep(projection, hidden, chunk, turn)
    loss = placed(loss.where(mask, 0.0), kept, N)
    lse = placed(lse, kept, N)
    gradients = None if seed is None else projection.gradients(placed(drows, kept, N), weight, bias)
    return loss, lse, gradients


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    terms: LossTerms,
    chunk: int,
) -> Gradients:
    """The gradients of sum(seed * loss), from recomputed logits and the lse that `forward` returned."""
    N, kept = hidden.shape[0], kept_tokens(targets, terms)
    if kept is not None:
        hidden, targets, lse, seed = (t.index_select(0, kept) for t in (hidden, targets, lse, seed))
    mask = targets != terms.ignore_index
    projection = ChunkedProjection(weight, bias, min(chunk, max(hidden.shape[0], 1)))
    safe, seed = targets.where(mask, 0), seed.to(projection.wide) * mask

    def turn(logits: torch.Tensor, span: slice) -> torch.Tensor:
        block = logits.to(projection.wide)
        return gradient_(block, refold_(block, lse[span], terms), safe[span], seed[span], terms)

    drows = sweep(projection, hidden, chunk, turn)
    return projection.gradients(placed(drows, kept, N), weight, bias)
