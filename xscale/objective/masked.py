"""Masked language modelling (Devlin et al. 2019, section 3.1): some tokens are masked, replaced or kept."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import Fraction
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits, SpecialTokens


@OBJECTIVES.register("masked", traits=ObjectiveTraits(causal=False, source=False, random=True))
class Masked(Objective):
    class Config(Objective.Config):
        renamed = {
            "share": "mask_probability",
            "hidden": "mask_fraction",
            "replaced": "random_fraction",
        }
        mask_probability: float = Field(default=0.15, gt=0, lt=1)
        """Fraction of the tokens that are predicted; special tokens, such as those that end documents, never are."""
        mask_fraction: Fraction = 0.8
        """Fraction of the predicted tokens that the mask token replaces."""
        random_fraction: Fraction = 0.1
        """Fraction of the predicted tokens that a random token replaces; the rest stay as they are."""

    @classmethod
    def check(
        cls, config: Any, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = []
        if config.mask_fraction + config.random_fraction > 1:
            what = f"mask_fraction {config.mask_fraction} + random_fraction {config.random_fraction} exceeds 1"
            choices = take(round(1 - config.random_fraction, 4), key=f"{path}.mask_fraction")
            choices += take(round(1 - config.mask_fraction, 4), key=f"{path}.random_fraction")
            problems.append(Problem(path, what, "Lower values work too.", choices=choices))
        if specials is not None and specials.mask is None:
            what = "the tokenizer has no mask token"
            problems.append(
                Problem(path, what, "Name one (data.tokenizer.mask), or take another tokenizer.")
            )
        return problems

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        ids = tokens[:, :-1]  # [B, T]
        predicted, fate, random = self._draw(ids, index)
        targets = torch.where(predicted, ids, IGNORE_INDEX)
        masked = predicted & (fate < self.config.mask_fraction)
        replaced = (
            predicted & ~masked & (fate < self.config.mask_fraction + self.config.random_fraction)
        )
        assert self.specials.mask is not None
        inputs = torch.where(masked, self.specials.mask, torch.where(replaced, random, ids))
        within = None if documents is None else documents[:, :-1]
        return Batch(Tokens.from_ids(inputs, within, **fields), targets)

    def _draw(self, ids: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, T] and numbers [B] of samples -> which tokens are predicted, uniform numbers and random tokens, each
        [B, T]."""
        predicted = []
        fate = []
        random = []
        length = ids.shape[1]
        for is_text, number in zip(self.specials.is_text(ids), index.tolist(), strict=True):
            generator = torch.Generator().manual_seed(seed_of(self.seed, "masked", number))
            # A fixed count, not a coin flip per token, so that every sample has something to predict. Special tokens
            # are counted and not chosen, as in the authors' code.
            count = max(1, round(length * self.config.mask_probability))
            order = torch.randperm(length, generator=generator)
            order = order[is_text[order]]
            predicted.append(
                torch.zeros(length, dtype=torch.bool).index_fill(0, order[:count], True)
            )
            fate.append(torch.rand(length, generator=generator))
            random.append(torch.randint(self.specials.vocabulary, (length,), generator=generator))
        return torch.stack(predicted), torch.stack(fate), torch.stack(random)
