"""The objective of DisCo (Kasai et al. 2020): each token of a target from its source and a random subset of the others.

    L = - sum_n log P(y_n | X, Y_obs^n),  Y_obs^n a subset of the other tokens of Y

Each position has a subset of its own. Its size is uniform from none to all other tokens of the target, and all subsets
of a size are equally likely.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.attention.ops.mask import OBSERVED
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.length_head import LENGTHS
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits


@OBJECTIVES.register(
    "disco", traits=ObjectiveTraits(causal=False, source=True, random=True, samples="pairs")
)
class Disco(Objective):
    class Config(Objective.Config):
        decoding: Literal["easy_first", "mask_predict"] = "easy_first"
        """How a target is written. easy_first: all positions anew in each iteration, each from those that were easier
        than it in the first one (Kasai et al. 2020, section 4). mask_predict: the least likely ones anew, from all
        others (Ghazvininejad et al. 2019)."""
        iterations: PositiveInt = 10
        """Most iterations of decoding; easy_first ends where one changes nothing."""
        length_candidates: PositiveInt = 5
        """Likeliest lengths of which each is decoded; the target with the highest mean log-probability is taken."""

    predicts_length = True

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        assert documents is not None, "padding is told from text by its document"
        source, target = tokens[:, : self.length], tokens[:, self.length :]  # [B, S], [B, T]
        source_padding, is_padding = (
            documents[:, : self.length] != 0,
            documents[:, self.length :] != 0,
        )
        counts = (~is_padding).sum(1)
        rows = zip(counts.tolist(), index.tolist(), strict=True)
        observed = torch.stack(
            [self._observed(count, target.shape[1], number) for count, number in rows]
        )
        # No position observes padding, which needs no document of its own for that; it would have no source in one.
        lengths = {LENGTHS: counts - 1}
        return Batch(
            Tokens.from_ids(
                target, torch.zeros_like(target), signals={OBSERVED: observed}, **fields
            ),
            target.masked_fill(is_padding, IGNORE_INDEX),
            Tokens.from_ids(
                source, source_padding.long(), padding=source_padding, signals=lengths, **fields
            ),
        )

    def _observed(self, count: int, length: int, number: int) -> Tensor:
        """Draw which tokens each position of sample `number` observes: bool [T, T], of the first `count` tokens."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "disco", number))
        sizes = torch.randint(count, (count, 1), generator=generator)
        # A position comes last in its own order, so that no size reaches it.
        keys = torch.rand(count, count, generator=generator) + 2 * torch.eye(count)
        observed = torch.zeros(length, length, dtype=torch.bool)
        observed[:count, :count] = keys.argsort(1).argsort(1) < sizes
        return observed

    def source_of(self, ids: list[int]) -> list[int]:
        return [*ids, self.specials.eos]
