"""Wang et al. 2021 (Evolving Attention, Predictive Attention Transformer): a convolution over the maps of attention.

    A_l = alpha S_{l-1} + (1 - alpha) Q K^T / sqrt(K),  A_0 = Q K^T / sqrt(K)
    S_l = beta ReLU(conv(A_l)) + (1 - beta) A_l,  o = softmax(S_l) V

S and A [B, H, T, S] are scores before mask and softmax, Q K^T / sqrt(K) with what the position adds to it; the
convolution is 3 x 3 over queries and keys, with the heads as channels. Scores that the mask hides are 0 to it. In a
causal model its taps of later queries are left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import Fraction
from xscale.nn.attention.core import CORES, Core, CoreTraits
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.prior_scores import ScoreCore
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS

TAPS = 3
"""Queries and keys that the convolution reads."""


@CORES.register(
    "evolving",
    traits=CoreTraits(
        causal=True,
        bidirectional=True,
        cross=True,
        per_head=False,
        cost="2*T*S*K + 9*H*T*S",
        dropout=True,
        bias=True,
        position_terms=True,
        documents=True,
        decode=True,
        previous_scores=True,
    ),
)
class Evolving(ScoreCore):
    kernel: Parameter
    kernel_bias: Parameter
    keeps_state = True

    class Config(Core.Config):
        alpha: Fraction = 0.1
        """Weight of the previous layer's scores; this layer's have 1 - alpha."""
        beta: Fraction = 0.1
        """Weight of the convolution; what it reads has 1 - beta."""

    def __init__(self, config: Config, dims: Dims, heads: int, head_width: int) -> None:
        super().__init__(config, dims, heads, head_width)
        self.alpha, self.beta = config.alpha, config.beta
        # Queries of a decoder's cross-attention are in order of time too.
        self.rows = TAPS // 2 + 1 if dims.causal else TAPS
        """Queries that a score's convolution reads: the one before, itself, and in an encoder the next."""
        shape = (heads, heads, self.rows, TAPS)
        self.declare("kernel", shape, ("state", "state", "state", "state"), dims.init)
        self.declare("kernel_bias", (heads,), ("state",), ZEROS, decays=False)

    def combine(self, scores: Tensor, previous: Tensor | None, mask: AttentionMask) -> Tensor:
        if previous is not None:
            scores = self.alpha * previous + (1 - self.alpha) * scores
        visible = (
            scores
            if mask.allowed is None
            else scores.masked_fill(~mask.allowed.to(scores.device), 0.0)
        )
        before = None
        if mask.cache is not None:
            # In a decoder the convolution reads one query before; keys that are new since then are hidden from it.
            before, mask.cache["last_row"] = mask.cache.get("last_row"), visible[:, :, -1:].clone()
        return (
            self.beta * F.relu(self._convolve(visible, mask.query_documents, before))
            + (1 - self.beta) * scores
        )

    def _convolve(
        self, visible: Tensor, documents: Tensor | None, last_row: Tensor | None
    ) -> Tensor:
        """Convolve scores [B, H, T, S], 0 where hidden, of queries in `documents` [B, T]; None: in one.

        `last_row` [B, H, 1, S or less] has the scores of the query before the first; None: there is none.
        """
        kernel, bias = (
            self.use(parameter).to(visible.dtype) for parameter in (self.kernel, self.kernel_bias)
        )
        before, behind = TAPS // 2, self.rows - 1 - TAPS // 2
        if last_row is not None:
            last_row = F.pad(last_row, (0, visible.shape[3] - last_row.shape[3]))
            visible, before = torch.cat((last_row, visible), 2), 0
        around = F.pad(
            visible, (TAPS // 2, TAPS // 2, before, behind)
        )  # [B, H, T + rows - 1, S + 2]
        if documents is None:
            return F.conv2d(around, kernel, bias)
        # The corner of a document's map touches that of the next one, so each row of taps stays in its document.
        length, before = documents.shape[1], TAPS // 2
        convolved = bias[:, None, None]
        for row in range(self.rows):
            apart = (
                F.pad(documents, (before, behind), value=-1).narrow(1, row, length) != documents
            )  # [B, T]
            neighbours = around.narrow(2, row, length).masked_fill(apart[:, None, :, None], 0.0)
            convolved = convolved + F.conv2d(neighbours, kernel.narrow(2, row, 1))
        return convolved

    def multiply_adds(self, queries: int, keys: int, heads: int, head_width: int) -> float:
        convolution = heads * heads * self.rows * TAPS * queries * keys
        return super().multiply_adds(queries, keys, heads, head_width) + convolution
