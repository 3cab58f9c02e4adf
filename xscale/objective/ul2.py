"""Mixture of denoisers (Tay et al. 2022, UL2, section 3.1): one of several denoisers corrupts each sample, and the
source begins with a token that names its mode. Decoders have `ul2_decoder`.

Modes: R, short spans and few of them corrupted (regular); S, the end of the text, as by a prefix language model
(sequential); X, long spans or many of them (extreme).
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core import config as schema
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.init import seed_of
from xscale.nn.tokens import PACKED_PADDING, Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, ObjectiveTraits, SpecialTokens
from xscale.objective.span import corrupt_spans

MODES = ("R", "S", "X")
"""Modes, whose tokens are the last sentinels in this order."""
MEAN_LENGTHS = (4, 8, 16)
"""Mean lengths of spans that are tried where those of a denoiser are too short."""


class DenoiserConfig(schema.Config):
    mode: Literal["R", "S", "X"]
    """Mode whose token begins the source."""
    noise_density: float = Field(gt=0, lt=1)
    """r, the fraction of the tokens that are corrupted."""
    mean_length: float | None = Field(default=None, ge=1)
    """mu, the mean length of a corrupted span, in tokens; null: one span at the end of the sample."""

    def counts(self, length: int) -> tuple[int, int]:
        """Return the corrupted tokens and the spans of a sample of `length` tokens."""
        corrupted = min(max(round(length * self.noise_density), 1), length - 1)
        if self.mean_length is None:
            return corrupted, 1
        return corrupted, min(
            max(round(corrupted / self.mean_length), 1), corrupted, length - corrupted
        )


def _denoisers() -> tuple[DenoiserConfig, ...]:
    """The seven denoisers of the paper's table 1."""
    regular = [DenoiserConfig(mode="R", noise_density=0.15, mean_length=mean) for mean in (3, 8)]
    extreme = [
        DenoiserConfig(mode="X", noise_density=density, mean_length=mean)
        for density, mean in ((0.5, 3), (0.5, 8), (0.15, 64), (0.5, 64))
    ]
    return (*regular, DenoiserConfig(mode="S", noise_density=0.25), *extreme)


@OBJECTIVES.register(
    "ul2",
    traits=ObjectiveTraits(causal=True, source=True, random=True, padded=True),
    deviations=("The tokens of the modes are the last three sentinels of the tokenizer.",),
)
class Ul2(Objective):
    class Config(Objective.Config):
        denoisers: tuple[DenoiserConfig, ...] = Field(default_factory=_denoisers, min_length=1)
        """Denoisers, of which one is drawn for each sample, all equally likely."""

    @classmethod
    def example(cls) -> "Ul2.Config":
        """Config for samples of tens of tokens."""
        regular = DenoiserConfig(mode="R", noise_density=0.15, mean_length=4)
        extreme = DenoiserConfig(mode="X", noise_density=0.5, mean_length=8)
        return cls.Config(
            denoisers=(regular, DenoiserConfig(mode="S", noise_density=0.25), extreme)
        )

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = []
        for number, denoiser in enumerate(config.denoisers):
            corrupted, spans = denoiser.counts(length)
            if max(length - corrupted + spans + 2, corrupted + spans + 1) > length:
                what = f"with {corrupted} corrupted tokens in {spans} spans source or target exceed {length} tokens"
                where = f"{path}.denoisers.{number}"
                choices = take(*MEAN_LENGTHS, key=f"{where}.mean_length")
                choices += take(0.5, key=f"{where}.noise_density")
                choices += take(2 * length, 4 * length, key="data.sequence_length")
                problems.append(Problem(where, what, choices=choices))
            problems += check_sentinels(spans, specials, f"{path}.denoisers.{number}")
        return problems

    def mode_token(self, mode: Literal["R", "S", "X"]) -> int:
        """Return the token that begins the source of a mode."""
        return self.specials.sentinels[MODES.index(mode) - len(MODES)]

    def source_of(self, ids: list[int]) -> list[int]:
        """The text as the beginning of one whose end is corrupted, in mode S."""
        return [self.mode_token("S"), *ids, self.specials.sentinels[0], self.specials.eos]

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        ids = tokens[:, :-1]  # [B, T]
        within = torch.zeros_like(ids) if documents is None else documents[:, :-1]
        rows = [self._corrupt(*row) for row in zip(ids, within, index.tolist(), strict=True)]
        source, source_documents, target, target_documents = (
            torch.stack(column) for column in zip(*rows, strict=True)
        )
        start = torch.full_like(target[:, :1], self.start)
        decoder_inputs = torch.cat((start, target[:, :-1]), 1).clamp(min=0)
        return Batch(
            Tokens.from_ids(
                decoder_inputs, target_documents, signals={PACKED_PADDING: target < 0}, **fields
            ),
            target.masked_fill(target < 0, IGNORE_INDEX),
            Tokens.from_ids(
                source,
                source_documents,
                signals={PACKED_PADDING: source_documents > within[:, -1:]},
                **fields,
            ),
        )

    def _corrupt(
        self, row: Tensor, documents: Tensor, number: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source [S] with its documents and target [T] with its, all padded; padding of the target is negative."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "ul2", number))
        denoisers = self.config.denoisers
        denoiser = denoisers[int(torch.randint(len(denoisers), (), generator=generator))]
        source, source_at, target, target_at = corrupt_spans(
            row, denoiser.counts(len(row)), self.specials, generator
        )
        source = torch.cat((torch.tensor([self.mode_token(denoiser.mode)]), source))
        source_documents = documents[torch.cat((source_at[:1], source_at))]
        target_documents = documents[target_at]
        sizes = [denoiser.counts(len(row)) for denoiser in denoisers]
        longest_source = max(len(row) - corrupted + spans for corrupted, spans in sizes) + 2
        longest_target = max(corrupted + spans for corrupted, spans in sizes) + 1
        # Padding of the source is a document more. That of the target, which follows its text, stays in the last
        # document: in one of its own it would have no source to attend to.
        return (
            _padded(source, longest_source, self.specials.pad),
            _padded(source_documents, longest_source, int(documents[-1]) + 1),
            _padded(target, longest_target, -1),
            _padded(target_documents, longest_target, int(target_documents[-1])),
        )


def check_sentinels(spans: int, specials: SpecialTokens | None, path: str) -> list[Problem]:
    """List why the tokenizer cannot name the modes and that many spans; `specials` is None before it is known."""
    if specials is None or spans + len(MODES) <= len(specials.sentinels):
        return []
    what = f"{spans} spans and {len(MODES)} modes need a sentinel each, and the tokenizer has {len(specials.sentinels)}"
    return [
        Problem(
            path,
            what,
            "Lower noise_density, raise mean_length, shorten the sequence or add sentinels.",
        )
    ]


def _padded(x: Tensor, length: int, value: int) -> Tensor:
    """Pad x [N] with `value` to [length]."""
    return torch.cat((x, x.new_full((length - len(x),), value)))
