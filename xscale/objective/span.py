"""Span corruption (Raffel et al. 2020, section 3.1.4): sentinels stand for spans, which the target spells out."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits, SpecialTokens


@OBJECTIVES.register("span", traits=ObjectiveTraits(causal=True, source=True, random=True))
class Span(Objective):
    class Config(Objective.Config):
        renamed = {"share": "noise_density"}
        noise_density: float = Field(default=0.15, gt=0, lt=1)
        """Fraction of the tokens that are corrupted."""
        mean_length: float = Field(default=3.0, ge=1)
        """Mean length of a corrupted span, in tokens."""

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        _, spans = span_counts(config, length)
        if specials is not None and spans > len(specials.sentinels):
            what = f"{spans} spans need as many sentinels, and the tokenizer has {len(specials.sentinels)}"
            return [
                Problem(
                    path,
                    what,
                    "Lower noise_density, raise mean_length, shorten the sequence or add sentinels.",
                )
            ]
        return []

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        rows = [
            self._corrupt(row, number)
            for row, number in zip(tokens[:, :-1], index.tolist(), strict=True)
        ]
        source, source_at, target, target_at = (
            torch.stack(column) for column in zip(*rows, strict=True)
        )
        start = torch.full_like(target[:, :1], self.start)
        decoder_inputs = torch.cat((start, target[:, :-1]), 1)
        source_documents = target_documents = None
        if documents is not None:
            source_documents, target_documents = (
                documents.gather(1, source_at),
                documents.gather(1, target_at),
            )
        return Batch(
            Tokens.from_ids(decoder_inputs, target_documents, **fields),
            target,
            Tokens.from_ids(source, source_documents, **fields),
        )

    def _corrupt(self, row: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "span", number))
        return corrupt_spans(row, span_counts(self.config, len(row)), self.specials, generator)


def corrupt_spans(
    row: Tensor, counts: tuple[int, int], specials: SpecialTokens, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source and target of `row` [T], and the index in `row` that each token of the two stands for.

    `counts` are the corrupted tokens and the spans. The last span ends with the row, so that a single one is its end.
    """
    corrupted, spans = counts
    lengths = _random_partition(corrupted, spans, generator)
    gaps = _random_partition(len(row) - corrupted, spans, generator)
    source = []
    source_at = []
    target = []
    target_at = []
    at = 0
    for gap, size, sentinel in zip(gaps, lengths, specials.sentinels, strict=False):
        first = at + gap
        mark = row.new_tensor([sentinel])
        source += [row[at:first], mark]
        source_at += [torch.arange(at, first), torch.tensor([first])]
        target += [mark, row[first : first + size]]
        # A span over a document's end belongs to the document it starts in, where its sentinel is.
        target_at.append(torch.full((size + 1,), first))
        at = first + size
    last = torch.tensor([specials.eos])
    end_of_target = target_at[-1][-1:]
    return (
        torch.cat([*source, last]),
        torch.cat([*source_at, source_at[-1][-1:]]),
        torch.cat([*target, last]),
        torch.cat([*target_at, end_of_target]),
    )


def span_counts(config: Span.Config, length: int) -> tuple[int, int]:
    """Corrupted tokens and spans of a sample; the same for every sample, so that shapes are static."""
    corrupted = min(max(round(length * config.noise_density), 1), length - 1)
    spans = min(max(round(corrupted / config.mean_length), 1), corrupted, length - corrupted)
    return corrupted, spans


def _random_partition(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Split `total` at random into `count` parts of at least 1."""
    cuts = (torch.randperm(total - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
