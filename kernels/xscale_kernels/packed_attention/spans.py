"""Documents of packed sequences as spans of adjacent tokens, which kernels for sequences of any length take."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class DocumentSpans(NamedTuple):
    """The documents of B sequences of T tokens, whose B * T tokens stand in one row.

    Shapes do not depend on the documents, so that torch.compile makes one graph for all.
    """

    offsets: Tensor
    """[B * T + 1] int32: the first token of each of N documents, then B * T to the end."""
    sizes: Tensor
    """[2] int64, always on the CPU: N, and the tokens of the longest document."""
    order: Tensor | None
    """[B * T] int64: the tokens sorted by document, where one has tokens in several places; None: none has."""

    def to(self, device: torch.device) -> DocumentSpans:
        """Copy the tensors to a device, without waiting for it."""
        order = None if self.order is None else _copied(self.order, device)
        return DocumentSpans(_copied(self.offsets, device), self.sizes, order)

    def cut(self) -> tuple[Tensor, int]:
        """Return the N + 1 offsets and the tokens of the longest document."""
        count, longest = self.sizes.tolist()
        return self.offsets[: count + 1], longest


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_cpu and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def find_document_spans(documents: Tensor) -> DocumentSpans:
    """Find the spans of documents [B, T] with at least one token. For documents on a GPU the host waits once."""
    rows, order = documents.cpu(), None
    starts = _starts(rows)
    sorted_rows, by_document = rows.sort(dim=1, stable=True)
    if int(_starts(sorted_rows).sum()) != int(starts.sum()):
        first = torch.arange(len(rows))[:, None] * rows.shape[1]
        order, starts = (by_document + first).flatten(), _starts(sorted_rows)
    first_tokens = starts.flatten().nonzero()[:, 0]
    padding = rows.numel() + 1 - len(first_tokens)
    offsets = F.pad(first_tokens, (0, padding), value=rows.numel())
    sizes = torch.stack((torch.tensor(len(first_tokens)), offsets.diff().max()))
    return DocumentSpans(offsets.to(torch.int32), sizes, order)


def _starts(documents: Tensor) -> Tensor:
    """Whether each token [B, T] is the first of a run of its document."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts
