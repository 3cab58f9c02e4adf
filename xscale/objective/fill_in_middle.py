"""Fill in the middle (Bavarian et al. 2022): a document is cut at two places drawn at random, and its middle is moved
behind its suffix, so that a causal model learns to write text between what precedes and what follows it.

The order PSM is `<prefix> prefix <suffix> suffix <middle> middle`, and SPM `<prefix> <suffix> suffix <middle> prefix
middle`: the variant that the paper trains jointly with PSM. The loss is that of causal language modelling over all
sections and sentinels. With `data.cross_documents` the documents of a sample are told by their end-of-document tokens.
"""

from typing import Any

import torch
from torch import Tensor

from xscale.core.config import Fraction
from xscale.core.errors import Problem
from xscale.nn.init import seed_of
from xscale.objective.objective import (
    OBJECTIVES,
    Batch,
    Causal,
    Objective,
    ObjectiveTraits,
    SpecialTokens,
)

ADDED = 4
"""Tokens that a rearranged document has beside its text: three sentinels and the end of the document."""
LEAST = 3
"""Tokens of text that a document needs to be rearranged, one for each section."""


@OBJECTIVES.register(
    "fill_in_middle",
    traits=ObjectiveTraits(causal=True, source=False, random=True),
    deviations=(
        "Documents are cut between tokens; the paper cuts between characters, so that a section may begin in a word.",
        "The part of a document that is in a sample is rearranged in its own length, as in the paper's context-level "
        "variant: the three sentinels replace the last tokens of its text.",
        "An end-of-document token follows each middle, also where the sample ends before the document does; it then "
        "replaces one more token.",
        "A part that would keep fewer than three tokens of text stays as it is.",
    ),
)
class FillInMiddle(Causal):
    class Config(Objective.Config):
        fim_rate: Fraction = 0.5
        """Probability that a document is rearranged."""
        spm_rate: Fraction = 0.5
        """Probability that a rearranged document is in the order SPM, and not PSM."""

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        if specials is None or fim_tokens(specials) is not None:
            return []
        what = f"it needs three sentinels, and the tokenizer has {len(specials.sentinels)}"
        fix = (
            "Set data.tokenizer.sentinels to 3 or more; a tokenizer.json needs the special tokens <fim_prefix>, "
            "<fim_suffix> and <fim_middle>, or <extra_0>, <extra_1> and <extra_2>."
        )
        return [Problem(path, what, fix)]

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        within = (
            documents_by_end(tokens, self.specials.eos) if documents is None else documents
        )  # [B, T+1]
        rows = zip(tokens, within, index.tolist(), strict=True)
        return super().batch(
            torch.stack([self._rearrange(*row) for row in rows]), documents, index, **fields
        )

    def _rearrange(self, row: Tensor, documents: Tensor, number: int) -> Tensor:
        """Rearrange the documents of the sample `number` with ids `row` [T+1], each within its own places."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "fill_in_middle", number))
        ends = torch.unique_consecutive(documents, return_counts=True)[1].cumsum(0)
        # In double, in which every place of a document of any length is drawn.
        draws = torch.rand(len(ends), 4, generator=generator, dtype=torch.float64).tolist()
        pieces: list[Tensor] = []
        for part, (chosen, spm, *fractions) in zip(row.tensor_split(ends[:-1]), draws, strict=True):
            size = len(part) - ADDED
            if size < LEAST or chosen >= self.config.fim_rate:
                pieces.append(part)
                continue
            first, second = sorted(int(fraction * (size + 1)) for fraction in fractions)
            sections = part[:first], part[first:second], part[second:size]
            pieces += self._sections(*sections, spm=spm < self.config.spm_rate)
        return torch.cat(pieces)

    def _sections(
        self, prefix: Tensor, middle: Tensor, suffix: Tensor, *, spm: bool
    ) -> list[Tensor]:
        """Order a document's sections, with sentinels between them and its end."""
        end = prefix.new_tensor([self.specials.eos])
        return [*self._prompt(prefix, suffix, spm=spm), middle, end]

    def _prompt(self, prefix: Tensor, suffix: Tensor, *, spm: bool) -> list[Tensor]:
        """Order what precedes the middle."""
        tokens = fim_tokens(self.specials)
        assert tokens is not None, "`check` refuses tokenizers without sentinels"
        of_prefix, of_suffix, of_middle = prefix.new_tensor(tokens)[:, None].unbind()
        if spm:
            return [of_prefix, of_suffix, suffix, of_middle, prefix]
        return [of_prefix, prefix, of_suffix, suffix, of_middle]

    def prompt_for_middle(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """Return the ids after which the model writes the middle, in the order that training has more often."""
        sections = (torch.tensor(ids, dtype=torch.long) for ids in (prefix, suffix))
        ids: list[int] = torch.cat(self._prompt(*sections, spm=self.config.spm_rate > 0.5)).tolist()
        return ids


def fim_tokens(specials: SpecialTokens) -> tuple[int, int, int] | None:
    """Return the sentinels of prefix, suffix and middle: the tokenizer's for that, or its first; None: it has none."""
    if specials.fim is not None or len(specials.sentinels) < 3:
        return specials.fim
    of_prefix, of_suffix, of_middle = specials.sentinels[:3]
    return of_prefix, of_suffix, of_middle


def documents_by_end(tokens: Tensor, eos: int) -> Tensor:
    """Return the number of each token's document, each of which ends with `eos`: like `tokens` [B, T+1]."""
    ends = tokens == eos
    return ends.cumsum(1) - ends.long()
