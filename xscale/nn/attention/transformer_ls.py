"""Zhu et al. 2021 (Transformer-LS): short-term window attention plus long-term dynamic projection.

P = softmax over positions of k W, W [K, r]; projected keys P^T k and values P^T v. A query sees the window's keys and
the projected keys in one softmax, each kind with its own layer norm. Causal: projections of each segment before the
query's, and the window are the latest w keys (section 3.4 and the authors' code). Bidirectional: the window are the w
tokens in a row that the query is one of, and w/2 on each side (section 3.2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveInt
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.chunks import split_chunks, with_neighbour_chunks
from xscale.nn.attention.ops.dense import masked_softmax, repeat_kv, upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.init import ONES, Init


@CORES.register(
    "transformer_ls",
    traits=CoreTraits(
        normalised=False,
        causal=True,
        bidirectional=True,
        cross=False,
        per_head=True,
        cost="3 * T * projection_rank * K + 2 * T * (3 * segment + projection_rank) * K",
        context=("ulysses",),
        dropout=True,
        decode=True,
    ),
    deviations=(
        "Without `window` one length is that of the window and of the segments whose projections are seen, and a query "
        "sees its own and the neighbouring segments whole.",
        "The two layer norms have gains, which the heads share, and no biases.",
    ),
)
class TransformerLs(Core):
    mix: Parameter
    gains: Parameter

    class Config(Core.Config):
        renamed = {"slots": "projection_rank"}

        segment: PositiveInt = 64
        """l, tokens of a segment, whose projections later segments see in a causal model."""
        window: PositiveInt | None = None
        """w, keys of the window: the latest ones of a causal model, otherwise the w tokens in a row that the query is
        one of, and half as many on each side; null: the own segment and its neighbours (causal: the previous one)."""
        projection_rank: PositiveInt = 16
        """r, projected keys of the whole sequence (causal: of each segment)."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.config = config
        self.declare(
            "mix",
            (heads, head_width, config.projection_rank),
            ("heads", "state", "state"),
            Init(std=head_width**-0.5),
        )
        self.declare("gains", (4, head_width), ("state", "state"), ONES, decays=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        dtype = v.dtype
        size = self.config.window or self.config.segment
        queries = mask.queries
        # Pad queries for cached tokens: segments are counted from the start of the sequence.
        q = F.pad(upcast(q), (0, 0, mask.offset, 0)) * q.shape[-1] ** -0.5
        k, v = repeat_kv(upcast(k), q.shape[1]), repeat_kv(upcast(v), q.shape[1])
        length = k.shape[2]
        projected_k, projected_v = self._slots(k, v)
        window_k, window_v = (
            with_neighbour_chunks(split_chunks(x, 2, size), 2, not self.causal)
            for x in (self._norm(k, 0), self._norm(v, 1))
        )
        rows = split_chunks(q, 2, size)  # [B, H, N, C, K]
        window_scores = rows @ window_k.mT  # [B, H, N, C, W]
        hidden = self._hidden(
            rows.shape[2], length, window_scores.shape[-1], projected_k.shape[2], q.device
        )  # [N, C, W + R]
        projected_scores = (rows.flatten(2, 3) @ projected_k.mT).view(*window_scores.shape[:4], -1)
        weights = masked_softmax(torch.cat((window_scores, projected_scores), -1), hidden)
        weights = self.drop_weights(weights, mask)
        window_scores, projected_scores = (
            weights[..., : window_scores.shape[-1]],
            weights[..., window_scores.shape[-1] :],
        )
        out = (window_scores @ window_v).flatten(2, 3) + projected_scores.flatten(
            2, 3
        ) @ projected_v
        last: Tensor = out[:, :, mask.offset : mask.offset + queries]
        return last.to(dtype)

    def _norm(self, x: Tensor, which: int) -> Tensor:
        gain = self.use(self.gains)[which].to(x.dtype)
        return F.layer_norm(x, x.shape[-1:], gain)

    def _slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Projected keys and values [B, H, r, K], or [B, H, N * r, K] of a causal sequence's N complete segments."""
        scores = k @ self.use(self.mix).to(k.dtype)  # [B, H, S, R]
        if self.causal:
            size = self.config.segment
            complete = k.shape[2] // size * size
            scores, k, v = (split_chunks(x[:, :, :complete], 2, size) for x in (scores, k, v))
        projection = scores.softmax(-2).mT
        projected_k, projected_v = projection @ k, projection @ v
        if self.causal:
            projected_k, projected_v = projected_k.flatten(2, 3), projected_v.flatten(2, 3)
        return self._norm(projected_k, 2), self._norm(projected_v, 3)

    def _hidden(
        self, chunks: int, length: int, keys: int, projected: int, device: torch.device
    ) -> Tensor:
        """Return which keys of a chunk with its neighbours, and which projections, are hidden, [N, C, W + R]."""
        window, segment = self.config.window, self.config.segment
        size = window or segment
        query = torch.arange(chunks * size, device=device).view(chunks, size, 1)
        chunk = torch.arange(chunks, device=device)[:, None, None]
        key = (chunk - 1) * size + torch.arange(keys, device=device)
        hidden = (key < 0) | (key >= length) | ((key > query) & self.causal)
        if window is not None and self.causal:
            hidden = hidden | (key <= query - window)
        elif window is not None:
            begin = chunk * window
            hidden = hidden | (key < begin - window // 2) | (key >= begin + window + window // 2)
        slot = torch.arange(projected, device=device) // self.config.projection_rank
        beyond = (slot >= query // segment) & self.causal
        return torch.cat(
            (hidden.expand(chunks, size, keys), beyond.expand(chunks, size, projected)), -1
        )

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        segment, slots = self.config.segment, self.config.projection_rank
        size = self.config.window or segment
        padded = -(-keys // size) * size
        if not self.causal:
            return float(heads * head_width * (3 * keys * slots + 2 * padded * (3 * size + slots)))
        kept = keys // segment * slots
        return float(
            heads
            * head_width
            * ((keys + 2 * (keys // segment * segment)) * slots + 2 * padded * (2 * size + kept))
        )
