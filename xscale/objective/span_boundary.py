"""SpanBERT (Joshi et al. 2020): whole spans are masked, and each of their tokens is also predicted from the two tokens
around its span, by the model's boundary head."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import at_least
from xscale.nn.head.boundary_head import BOUNDARIES
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.masked import Masked
from xscale.objective.objective import OBJECTIVES, Batch, ObjectiveTraits, SpecialTokens
from xscale.objective.random_spans import draw_spans


@OBJECTIVES.register(
    "span_boundary",
    traits=ObjectiveTraits(causal=False, source=False, random=True),
    deviations=(
        "Spans begin and end at tokens of the tokenizer, not at whole words.",
        "Two spans never touch, and none begins or ends a document of a sample, so that each has both its boundaries. "
        "What does not fit is cut off, so that spans have 3.5 tokens in the mean, not 3.8.",
    ),
)
class SpanBoundary(Masked):
    class Config(Masked.Config):
        geometric: float = Field(default=0.2, gt=0, lt=1)
        """Parameter p of the lengths of spans: a length of n has a probability proportional to p (1 - p)^(n - 1)."""
        max_span: PositiveInt = 10
        """Longest span, in tokens; the model's boundary head has as many positions."""

    @classmethod
    def max_span(cls, config: Config) -> int:
        return int(config.max_span)

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = super().check(config, specials, length, path)
        if length < 3:
            what = f"a span and its two boundaries are three tokens, and a sample has {length}"
            problems.append(at_least("data.sequence_length", what, 3))
        return problems

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        ids = tokens[:, :-1]  # [B, T]
        within = None if documents is None else documents[:, :-1]
        numbers = torch.zeros_like(ids) if within is None else within
        rows = [self._row(*row) for row in zip(ids, numbers, index.tolist(), strict=True)]
        inputs, targets, boundaries = (torch.stack(column) for column in zip(*rows, strict=True))
        return Batch(
            Tokens.from_ids(inputs, within, signals={BOUNDARIES: boundaries}, **fields), targets
        )

    def _row(self, ids: Tensor, documents: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [T], targets [T] and boundaries [T, 2] of a sample; a token in no span is its own boundary."""
        config, length = self.config, len(ids)
        generator = torch.Generator().manual_seed(seed_of(self.seed, "span_boundary", number))
        inside = torch.zeros(length, dtype=torch.bool)
        inside[1:-1] = (documents[1:-1] == documents[:-2]) & (documents[1:-1] == documents[2:])
        inside &= self.specials.is_text(ids)
        weights = [(1 - config.geometric) ** size for size in range(config.max_span)]
        budget = max(1, round(length * config.mask_probability))
        inputs, targets = ids.clone(), torch.full_like(ids, IGNORE_INDEX)
        boundaries = torch.arange(length)[:, None].repeat(1, 2)
        for first, end in draw_spans(inside, budget, weights, generator, gap=1):
            targets[first:end] = ids[first:end]
            boundaries[first:end] = torch.tensor([first - 1, end])
            # All tokens of a span are masked, all are random, or all stay.
            fate = float(torch.rand((), generator=generator))
            random = torch.randint(self.specials.vocabulary, (end - first,), generator=generator)
            if fate < config.mask_fraction:
                assert self.specials.mask is not None
                inputs[first:end] = self.specials.mask
            elif fate < config.mask_fraction + config.random_fraction:
                inputs[first:end] = random
        return inputs, targets, boundaries
