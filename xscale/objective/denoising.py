"""Denoising (Lewis et al. 2020, BART, section 2.2): a model reads a corrupted text and writes the original.

A text is corrupted in the order of the functions below. Each document of a sample is corrupted by itself, and the token
that ends it stays at its end.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor

from xscale.core.config import Fraction, FractionBelowOne
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.init import seed_of
from xscale.nn.tokens import PACKED_PADDING, Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits, SpecialTokens

CORRUPTIONS = (
    "permuted_sentences",
    "masked_tokens",
    "infilled",
    "deleted_tokens",
    "rotated_documents",
)
"""Keys of the corruptions, in their order."""


@OBJECTIVES.register(
    "denoising",
    traits=ObjectiveTraits(causal=True, source=True, random=True, padded=True),
    deviations=(
        "A document of a packed sample is corrupted by itself; the paper's code corrupts whole samples of 512 tokens.",
        "A sentence ends with a token whose text ends in a full stop, which in code is no end of a sentence.",
        "A document has no more masks of text infilling than tokens that they replace, so that no source is longer "
        "than its text: further spans of length 0 are left out.",
    ),
)
class Denoising(Objective):
    """Text infilling and sentence permutation by default, which the paper trains BART with."""

    class Config(Objective.Config):
        permuted_sentences: Fraction = 1.0
        """Sentence permutation: fraction of a document's sentences that are shuffled among their places."""
        masked_tokens: FractionBelowOne = 0.0
        """Token masking: fraction of the tokens that become a mask token each."""
        infilled: FractionBelowOne = 0.3
        """Text infilling: fraction of the tokens in spans that become one mask token each; a span of length 0 inserts
        one."""
        mean_span: float = Field(default=3.0, ge=0.5)
        """Mean of the Poisson distribution of the lengths of infilled spans."""
        deleted_tokens: FractionBelowOne = 0.0
        """Token deletion: fraction of the tokens that are left out."""
        rotated_documents: Fraction = 0.0
        """Document rotation: probability that a document is rotated to begin with a token chosen at random."""

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = []
        if not any(getattr(config, name) for name in CORRUPTIONS):
            what = "no text is corrupted, and the model would learn to copy"
            choices = [choice for name in CORRUPTIONS for choice in take(0.3, key=f"{path}.{name}")]
            fix = "Other values above 0 work too."
            problems.append(Problem(path, what, fix, choices=tuple(choices)))
        if specials is None:
            return problems
        for name in ("masked_tokens", "infilled"):
            if getattr(config, name) and specials.mask is None:
                what = "the tokenizer has no mask token"
                fix = "Or name one (data.tokenizer.mask), or take another tokenizer."
                problems.append(Problem(f"{path}.{name}", what, fix, choices=take(0.0)))
        if config.permuted_sentences and not specials.sentence_ends:
            what = (
                "the tokenizer has no token that ends in a full stop, and so no end of a sentence"
            )
            fix = "Or take another tokenizer."
            problems.append(Problem(f"{path}.permuted_sentences", what, fix, choices=take(0.0)))
        return problems

    @property
    def start(self) -> int:
        return self.specials.eos

    def source_of(self, ids: list[int]) -> list[int]:
        return [*ids, self.specials.eos]

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        ids = tokens[:, :-1]  # [B, T]
        within = torch.zeros_like(ids) if documents is None else documents[:, :-1]
        rows = [self._corrupt(*row) for row in zip(ids, within, index.tolist(), strict=True)]
        source, source_documents = (torch.stack(column) for column in zip(*rows, strict=True))
        start = torch.full_like(ids[:, :1], self.start)
        # The decoder reads the end of the document before as the start of the next one, as in the paper's code.
        return Batch(
            Tokens.from_ids(torch.cat((start, ids[:, :-1]), 1), within, **fields),
            ids,
            # Padding of the source is a document behind those of the text.
            Tokens.from_ids(
                source,
                source_documents,
                signals={PACKED_PADDING: source_documents > within[:, -1:]},
                **fields,
            ),
        )

    def _corrupt(self, row: Tensor, documents: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Source of the sample `number` with ids `row` [T] and its documents, both [T]: padding is a document more."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "denoising", number))
        padding = int(documents[-1]) + 1
        source, numbers = (
            torch.full_like(row, self.specials.pad),
            torch.full_like(documents, padding),
        )
        written = 0
        numbers_of_documents, counts = torch.unique_consecutive(documents, return_counts=True)
        for document, count in zip(numbers_of_documents.tolist(), counts.tolist(), strict=True):
            text, row = row[:count], row[count:]
            corrupted = self._corrupt_document(text, generator)
            source[written : written + len(corrupted)] = corrupted
            numbers[written : written + len(corrupted)] = document
            written += len(corrupted)
        return source, numbers

    def _corrupt_document(self, text: Tensor, generator: Generator) -> Tensor:
        config, ends = self.config, int(text[-1] == self.specials.eos)
        text, end = text[: len(text) - ends], text[len(text) - ends :]
        if not len(text):
            return end
        mask = -1 if self.specials.mask is None else self.specials.mask
        text = permute_sentences(
            text, self.specials.sentence_ends, config.permuted_sentences, generator
        )
        text = mask_tokens(text, mask, config.masked_tokens, generator)
        text = infill(text, mask, config.infilled, config.mean_span, generator)
        text = delete_tokens(text, config.deleted_tokens, generator)
        return torch.cat((rotate(text, config.rotated_documents, generator), end))


def permute_sentences(
    text: Tensor, ends: frozenset[int], fraction: float, generator: Generator
) -> Tensor:
    """Shuffle `fraction` of the sentences of `text` [N] among their places; each ends with tokens of `ends`."""
    if not fraction:
        return text
    is_end = torch.isin(text, torch.tensor(sorted(ends), dtype=text.dtype))
    cuts = (is_end[:-1] & ~is_end[1:]).nonzero().flatten() + 1
    sentences = text.tensor_split(cuts)
    order = torch.arange(len(sentences))
    chosen = torch.randperm(len(sentences), generator=generator)[: round(fraction * len(sentences))]
    order[chosen.sort().values] = chosen
    return torch.cat([sentences[position] for position in order.tolist()])


def mask_tokens(text: Tensor, mask: int, fraction: float, generator: Generator) -> Tensor:
    """Replace `fraction` of the tokens of `text` [N] by `mask`."""
    if not fraction:
        return text
    chosen = torch.randperm(len(text), generator=generator)[: round(fraction * len(text))]
    return text.index_fill(0, chosen, mask)


def infill(text: Tensor, mask: int, fraction: float, mean: float, generator: Generator) -> Tensor:
    """Replace spans with `fraction` of the tokens of `text` [N] by one `mask` each; their lengths are Poisson."""
    lengths = span_lengths(round(fraction * len(text)), mean, generator)
    if not lengths:
        return text
    # The spans stand at random places among the tokens that are kept, which makes every arrangement as likely.
    places = len(text) - sum(lengths) + len(lengths)
    is_span = torch.zeros(places, dtype=torch.bool)
    is_span[torch.randperm(places, generator=generator)[: len(lengths)]] = True
    sizes = torch.ones(places, dtype=torch.long)
    sizes[is_span] = torch.tensor(lengths)
    result = torch.full((places,), mask, dtype=text.dtype)
    kept = torch.repeat_interleave(~is_span, sizes)  # [N]
    result[~is_span] = text[kept]
    return result


def span_lengths(total: int, mean: float, generator: Generator) -> list[int]:
    """Draw Poisson lengths until they sum to `total`, to which the last is cut; at most `total` of them."""
    lengths: list[int] = []
    missing = total
    while missing:
        length = min(int(torch.poisson(torch.tensor(mean), generator=generator)), missing)
        missing -= length
        lengths.append(length)
    empty = len(lengths) - total
    if empty > 0:
        inserted = [position for position, length in enumerate(lengths) if not length][-empty:]
        lengths = [length for position, length in enumerate(lengths) if position not in inserted]
    return lengths


def delete_tokens(text: Tensor, fraction: float, generator: Generator) -> Tensor:
    """Leave out `fraction` of the tokens of `text` [N], at most all but one."""
    if not fraction:
        return text
    count = min(round(fraction * len(text)), len(text) - 1)
    return text[torch.randperm(len(text), generator=generator)[count:].sort().values]


def rotate(text: Tensor, probability: float, generator: Generator) -> Tensor:
    """Rotate `text` [N], with that probability, to begin with a token chosen at random."""
    if not probability or torch.rand((), generator=generator) >= probability:
        return text
    return text.roll(-int(torch.randint(len(text), (), generator=generator)))
