"""Masked language modelling and contrastive predictive coding (Ainslie et al. 2020, ETC): whole sentences are masked,
and the model's global tokens of these sentences predict what they say (`xscale.nn.head.sentence_contrast`)."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import NonNegativeFloat, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, at_most
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.sentence_contrast import SENTENCE_GLOBALS, SENTENCE_WEIGHT, SENTENCES
from xscale.nn.init import seed_of
from xscale.objective.masked import Masked
from xscale.objective.objective import OBJECTIVES, Batch, ObjectiveTraits, SpecialTokens


@OBJECTIVES.register(
    "cpc",
    traits=ObjectiveTraits(causal=False, source=False, random=True),
    deviations=(
        "A sentence is a block of `sentence_length` tokens, the segment of a global token in the core etc.",
        "Scores are products of states over sqrt(D).",
        "The tokens of masked sentences are not predicted one by one.",
        "The flops of encoding the masked sentences by themselves are not counted.",
    ),
)
class Cpc(Masked):
    """The micro-batches that the data-parallel ranks compute together have their negatives in common, so that the loss
    depends on the number of ranks and on `train.micro_batch_size`."""

    class Config(Masked.Config):
        sentence_length: PositiveInt = 32
        """Tokens of a sentence; sentence i of a sample is that of global token i."""
        sentence_fraction: float = Field(default=0.125, gt=0, lt=1)
        """Fraction of a sample's sentences that are masked, at least one."""
        sentence_weight: NonNegativeFloat = 0.25
        """Weight of the loss of sentences beside that of tokens; the paper weighs them 0.2 to 0.8."""

    @classmethod
    def sentences(cls, config: Config, length: int) -> int:
        """Return the number of sentences of a sample of `length` tokens."""
        return length // int(config.sentence_length)

    @classmethod
    def needs(cls, config: Config) -> list[KeyNeed]:
        twice = f"'{config.kind}' runs the model twice in a forward, "
        return [
            *super().needs(config),
            KeyNeed(
                "parallel.zero.engine", ("torch",), f"{twice}which is for the engine torch alone"
            ),
            KeyNeed(
                "distill",
                (None,),
                f"{twice}and a student is compared with its teacher once",
                instead=(("objective.kind", "masked"),),
            ),
        ]

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = super().check(config, specials, length, path)
        if cls.sentences(config, length) < 2:
            what = f"a sample of {length} tokens has fewer than two sentences of {config.sentence_length}"
            problems.append(at_most(f"{path}.sentence_length", what, length // 2))
        return problems

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        length, ids = self.config.sentence_length, tokens[:, :-1]  # [B, T]
        count = self.sentences(self.config, ids.shape[1])
        chosen = torch.stack([self._choose(count, number) for number in index.tolist()])  # [B, K]
        of_sentences = ids[:, : count * length].reshape(
            len(ids), count, length
        )  # [B, sentences, N]
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[:, : count * length] = (
            torch.zeros(len(ids), count, dtype=torch.bool)
            .scatter(1, chosen, True)
            .repeat_interleave(length, 1)
        )
        fields["signals"] = {
            SENTENCES: of_sentences.gather(1, chosen[..., None].expand(-1, -1, length)),
            SENTENCE_GLOBALS: chosen,
            SENTENCE_WEIGHT: self.config.sentence_weight,
        }
        batch = super().batch(tokens, documents, index, **fields)
        assert self.specials.mask is not None
        batch.tokens.ids[masked] = self.specials.mask
        return Batch(batch.tokens, batch.targets.masked_fill(masked, IGNORE_INDEX))

    def _choose(self, count: int, number: int) -> Tensor:
        """Draw which of the sentences of the sample `number` are masked: [K]."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "cpc", number))
        masked = min(max(1, round(count * self.config.sentence_fraction)), count - 1)
        return torch.randperm(count, generator=generator)[:masked].sort().values
