"""Masked language modelling on pairs of texts, and a class of the pair: BERT, ALBERT and StructBERT.

    [CLS] x_1 ... x_m [SEP] y_1 ... y_n [SEP]

The class says whether y follows x in the corpus (Devlin et al. 2019, section 3.1), whether the two are in their order
(Lan et al. 2020, section 3.1), or both in three classes (Wang et al. 2020, section 2.3).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from xscale.core.config import FractionBelowOne, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.pooler import LABELS
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tokens
from xscale.objective.masked import Masked
from xscale.objective.objective import OBJECTIVES, Batch, ObjectiveTraits, SpecialTokens
from xscale.objective.random_spans import draw_spans

FIRST, SECOND, OTHER = 0, 1, 2
"""Document numbers in a sample: the halves of consecutive text, and text of another document."""
TASKS = {
    "next": ((FIRST, SECOND), (FIRST, OTHER)),
    "order": ((FIRST, SECOND), (SECOND, FIRST)),
    "three_way": ((FIRST, SECOND), (SECOND, FIRST), (FIRST, OTHER)),
}
"""The two texts of each class, which are equally likely."""


@OBJECTIVES.register(
    "masked_sentences",
    traits=ObjectiveTraits(causal=False, source=False, random=True, samples="sentences"),
    deviations=(
        "Masked tokens are those of the tokenizer, not whole words.",
        "Where the second text is random, the text after the first one is not reused in another sample, and the random "
        "one is truncated at its end.",
        "StructBERT's trigrams are disjoint, and `shuffled_trigrams` is the fraction of the text that is in them.",
    ),
)
class MaskedSentences(Masked):
    """The beginning-of-text token is [CLS], and the end-of-document token [SEP]."""

    class Config(Masked.Config):
        task: Literal["next", "order", "three_way"] = "next"
        """Class of a pair. next: whether the second text follows the first, or is of another document (BERT). order:
        whether the second text follows the first, or precedes it (ALBERT). three_way: whether it follows, precedes, or
        is of another document (StructBERT)."""
        ngrams: PositiveInt = 1
        """Longest n-gram that is masked as one; a length of n has a probability proportional to 1/n (ALBERT)."""
        shuffled_trigrams: FractionBelowOne = 0.0
        """Fraction of the text in trigrams whose tokens are shuffled, and predicted in their order (StructBERT). Masked
        tokens are not among them."""

    @classmethod
    def classes(cls, config: Any) -> int:
        return len(TASKS[config.task])

    @classmethod
    def check(
        cls, config: Any, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = super().check(config, specials, length, path)
        if specials is not None and specials.bos is None:
            what = "the tokenizer has no token for [CLS]"
            fix = "Name one (data.tokenizer.bos, such as '[CLS]', and eos '[SEP]'), or take another tokenizer."
            problems.append(Problem(path, what, fix))
        if config.mask_probability + config.shuffled_trigrams > 1:
            what = (
                f"mask_probability {config.mask_probability} + "
                f"shuffled_trigrams {config.shuffled_trigrams} exceeds 1"
            )
            choices = take(round(1 - config.shuffled_trigrams, 4), key=f"{path}.mask_probability")
            choices += take(round(1 - config.mask_probability, 4), key=f"{path}.shuffled_trigrams")
            problems.append(Problem(path, what, "Lower values work too.", choices=choices))
        return problems

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        assert documents is not None, "the texts of a sample are told apart by their documents"
        rows = zip(tokens, documents, index.tolist(), strict=True)
        samples = [self._sample(*row) for row in rows]
        ids, types, targets, padding = (
            torch.stack([getattr(sample, name) for sample in samples])
            for name in ("ids", "types", "targets", "padding")
        )
        labels = {LABELS: torch.tensor([sample.label for sample in samples])}
        return Batch(
            Tokens.from_ids(
                ids, padding.long(), padding=padding.bool(), types=types, signals=labels, **fields
            ),
            targets,
        )

    def _sample(self, tokens: Tensor, documents: Tensor, number: int) -> "MaskedPair":
        generator = torch.Generator().manual_seed(seed_of(self.seed, "masked_sentences", number))
        pairs = TASKS[self.config.task]
        label = int(torch.randint(len(pairs), (), generator=generator))
        first, second = (tokens[documents == text] for text in pairs[label])
        cls, sep = torch.tensor([self.specials.bos]), torch.tensor([self.specials.eos])
        pair = torch.cat((cls, first, sep, second, sep))
        assert len(pair) <= self.length, (
            f"a pair of {len(pair)} tokens in a sample of {self.length}"
        )
        ids = torch.full((self.length,), self.specials.pad)
        ids[: len(pair)] = pair
        places = torch.arange(self.length)
        middle = len(first) + 2
        types = ((places >= middle) & (places < len(pair))).long()
        is_text = (places > 0) & (places < len(pair) - 1) & (places != middle - 1)
        inputs, targets = self._corrupt(ids, is_text, len(pair), generator)
        return MaskedPair(inputs, types, targets, places >= len(pair), label)

    def _corrupt(
        self, ids: Tensor, is_text: Tensor, length: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Mask and shuffle the ids [T] of a pair with `length` tokens: inputs and targets, each [T]."""
        config = self.config
        budget = min(max(1, round(length * config.mask_probability)), int(is_text.sum()))
        weights = [1 / size for size in range(1, config.ngrams + 1)]
        masked = torch.zeros_like(is_text)
        for start, end in draw_spans(is_text, budget, weights, generator):
            masked[start:end] = True
        fate = torch.rand(len(ids), generator=generator)
        random = torch.randint(self.specials.vocabulary, ids.shape, generator=generator)
        inputs = torch.where(
            masked & (fate < config.mask_fraction + config.random_fraction), random, ids
        )
        assert self.specials.mask is not None
        inputs = torch.where(masked & (fate < config.mask_fraction), self.specials.mask, inputs)
        predicted, trigrams = masked.clone(), round(length * config.shuffled_trigrams / 3)
        for start, end in draw_spans(
            is_text & ~masked, 3 * trigrams, [0, 0, 1], generator, least=3
        ):
            inputs[start:end] = ids[start:end][torch.randperm(3, generator=generator)]
            predicted[start:end] = True
        return inputs, torch.where(predicted, ids, IGNORE_INDEX)


@dataclass(frozen=True)
class MaskedPair:
    """A pair of texts with its class."""

    ids: Tensor
    """[T], with what is corrupted."""
    types: Tensor
    """[T]: 0 for the first text with its [CLS] and [SEP], and for padding; 1 for the second with its [SEP]."""
    targets: Tensor
    """[T] ids; -100 is ignored."""
    padding: Tensor
    """[T], whether each token pads the pair."""
    label: int
