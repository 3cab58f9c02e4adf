"""Prefix language model (Dong et al. 2019, UniLM; Raffel et al. 2020, section 3.2.1): the tokens of a text's prefix see
each other in both directions, and each token after it is predicted from the prefix and from those before it."""

from typing import Any

import torch
from torch import Tensor

from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits


@OBJECTIVES.register(
    "prefix_lm", traits=ObjectiveTraits(causal=True, source=False, random=True, prefix=True)
)
class PrefixLm(Objective):
    """Each document of a sample is split in two at a place drawn at random (Raffel et al. 2020, section 3.3.1).

    All places between two of its tokens are equally likely. Tokens of the prefix are not predicted: those that predict
    them have seen them. With `data.cross_documents` a sample is one document.
    """

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        within = torch.zeros_like(tokens) if documents is None else documents  # [B, T+1]
        rows = zip(within, index.tolist(), strict=True)
        prefix = torch.stack([self._prefix(row, number) for row, number in rows])  # [B, T+1]
        ignored = prefix[:, 1:] | (within[:, 1:] != within[:, :-1])
        of_inputs = None if documents is None else documents[:, :-1]
        return Batch(
            Tokens.from_ids(tokens[:, :-1], of_inputs, prefix=prefix[:, :-1], **fields),
            tokens[:, 1:].masked_fill(ignored, IGNORE_INDEX),
        )

    def _prefix(self, documents: Tensor, number: int) -> Tensor:
        """Draw whether each token of the sample `number` is in a prefix: bool [T+1], like its `documents`."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "prefix_lm", number))
        counts = torch.unique_consecutive(documents, return_counts=True)[1]
        prefix = []
        for count in counts.tolist():
            # A document of one token has nothing to predict, and is drawn for all the same.
            length = 1 + int(torch.randint(max(1, count - 1), (), generator=generator))
            prefix.append(torch.arange(count) < length)
        return torch.cat(prefix)
