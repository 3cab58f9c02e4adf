"""Mixture of denoisers for a decoder with a prefix (Tay et al. 2022, UL2, section 3): the target of each corrupted text
follows its source, the source is read in both directions, and the target is predicted."""

from typing import Any

import torch
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import at_least
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.tokens import PACKED_PADDING, Tokens
from xscale.objective.objective import OBJECTIVES, Batch, ObjectiveTraits, SpecialTokens
from xscale.objective.span import corrupt_spans
from xscale.objective.ul2 import DenoiserConfig, Ul2, check_sentinels

SHORTEST = 2
"""Tokens of the shortest text that can be corrupted: one that stays and one that is predicted."""


@OBJECTIVES.register(
    "ul2_decoder",
    traits=ObjectiveTraits(causal=True, source=False, random=True, padded=True, prefix=True),
    deviations=(
        "The tokens of the modes are the last three sentinels of the tokenizer.",
        "A denoiser is drawn for each document of a sample; the paper's samples are one text.",
        "The mode, the sentinels and the ends of source and target replace the last tokens of a sample's text, which "
        "are not trained on; the paper cuts its text into pieces that leave room for them.",
    ),
)
class Ul2Decoder(Ul2):
    class Config(Ul2.Config):
        pass

    @classmethod
    def check(
        cls, config: Ul2.Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = []
        for number, denoiser in enumerate(config.denoisers):
            needed = SHORTEST + added_tokens(denoiser, SHORTEST) - 1
            if length < needed:
                what = (
                    "two tokens of text, their mode, sentinels and ends "
                    f"have {needed + 1}, and a sample {length + 1}"
                )
                return [at_least("data.sequence_length", what, needed)]
            spans = denoiser.counts(text_tokens(denoiser, length + 1, length + 1))[1]
            problems += check_sentinels(spans, specials, f"{path}.denoisers.{number}")
        return problems

    def prompt_of(self, ids: list[int]) -> list[int]:
        return self.source_of(ids)

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        within = torch.zeros_like(tokens) if documents is None else documents  # [B, T+1]
        rows = [self._rearrange(*row) for row in zip(tokens, within, index.tolist(), strict=True)]
        ids, numbers, prefix = (
            torch.stack(column) for column in zip(*rows, strict=True)
        )  # [B, T+1]
        is_padding = numbers == tokens.shape[1]
        ignored = prefix[:, 1:] | (numbers[:, 1:] != numbers[:, :-1]) | is_padding[:, 1:]
        return Batch(
            Tokens.from_ids(
                ids[:, :-1],
                numbers[:, :-1],
                prefix=prefix[:, :-1],
                signals={PACKED_PADDING: is_padding[:, :-1]},
                **fields,
            ),
            ids[:, 1:].masked_fill(ignored, IGNORE_INDEX),
        )

    def _rearrange(
        self, row: Tensor, documents: Tensor, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, documents, and whether each token is of a source, all [T+1], of one sample [T+1].

        Padding at the end is a document of its own, whose number is that of the sample's tokens.
        """
        generator = torch.Generator().manual_seed(seed_of(self.seed, "ul2_decoder", number))
        counts = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        ids = []
        numbers = []
        prefix = []
        begin = 0
        room = total = len(row)
        for document, count in enumerate(counts):
            denoiser = self.config.denoisers[
                int(torch.randint(len(self.config.denoisers), (), generator=generator))
            ]
            length = text_tokens(denoiser, count, room)
            if length >= SHORTEST:
                text = row[begin : begin + length]
                source, _, target, _ = corrupt_spans(
                    text, denoiser.counts(length), self.specials, generator
                )
                ids += [torch.tensor([self.mode_token(denoiser.mode)]), source, target]
                size = 1 + len(source) + len(target)
                numbers.append(torch.full((size,), document))
                prefix.append(torch.arange(size) <= len(source))
                room -= size
            begin += count
        ids.append(torch.full((room,), self.specials.pad))
        numbers.append(torch.full((room,), total))
        prefix.append(torch.zeros(room, dtype=torch.bool))
        return torch.cat(ids), torch.cat(numbers), torch.cat(prefix)


def added_tokens(denoiser: DenoiserConfig, length: int) -> int:
    """Return the tokens that the source and target of a text of `length` tokens have besides the text: its mode, two
    sentinels for each span, and two ends."""
    return 2 * denoiser.counts(length)[1] + 3


def text_tokens(denoiser: DenoiserConfig, count: int, room: int) -> int:
    """Return the most tokens of a text of `count` whose source and target have `room` tokens; below `SHORTEST` if not
    even the shortest text has as few."""
    length = min(count, room)
    while length >= SHORTEST and length + added_tokens(denoiser, length) > room:
        length -= 1
    return length
