"""Training objectives, which turn packed samples into inputs and targets and compute the loss; `causal`."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from xscale.core import config as schema
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.nn.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens

Samples = Literal["packed", "pairs", "sentences"]
"""Kinds of samples: packed text; pairs of a source and a target, each padded to its length; and sentences, which are
consecutive text in two halves and text of another document."""


@dataclass(frozen=True)
class ObjectiveTraits:
    """Requirements of an objective on the model, and its properties."""

    causal: bool
    """Needs a causal model; otherwise a bidirectional one."""
    source: bool
    """Needs a model that reads a source sequence."""
    random: bool
    """Corrupts inputs at random, seeded by the sample's number, so that every layout corrupts the same tokens."""
    samples: Samples = "packed"
    """Kind of the samples: packed text, pairs of a source and a target, or another one that `Samples` names."""

    @property
    def records(self) -> Literal["text", "pairs"]:
        """Content of the documents of which the samples are made, which is a trait of sources."""
        return "pairs" if self.samples == "pairs" else "text"


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that objectives use."""

    vocabulary: int
    pad: int
    eos: int
    mask: int | None
    """None: the tokenizer has none."""
    sentinels: range
    bos: int | None = None
    """Beginning of a text, the [CLS] of BERT, whose [SEP] is `eos`; None: the tokenizer has none."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one micro-batch."""

    tokens: Tokens
    targets: Tensor
    """[B, T] token ids; -100 is ignored."""
    source: Tokens | None = None
    counted: int | None = None
    """`weight`, where it was counted before the batch went to a device; None: not counted yet."""

    @property
    def weight(self) -> Tensor:
        """Number of targets that are not ignored; the step's loss is the summed loss over the sum of these."""
        return (self.targets != IGNORE_INDEX).sum()

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        source = None if self.source is None else self.source.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device, non_blocking=True), source, self.counted)


class Objective:
    """Built as `Objective(config, specials, length, seed)`."""

    class Config(schema.Config):
        label_smoothing: float = Field(default=0.0, ge=0, lt=1)
        """Probability that the training loss spreads evenly over the vocabulary, taken from the target (Szegedy et al.
        2016); evaluations report the loss without it."""

    def __init__(self, config: Any, specials: SpecialTokens, length: int, seed: int) -> None:
        self.config = config
        self.specials = specials
        self.length = length
        self.seed = seed

    @classmethod
    def check(cls, config: Any, specials: SpecialTokens | None, length: int, path: str) -> list[Problem]:
        """List the problems with samples of `length` tokens; `specials` is None before the tokenizer is known."""
        return []

    @classmethod
    def classes(cls, config: Any) -> int | None:
        """Return the number of classes of a sequence, which `Tokens.labels` tells; None: there are none."""
        return None

    @classmethod
    def max_span(cls, config: Any) -> int | None:
        """Return the longest masked span, whose boundaries `Tokens.boundaries` tells; None: it tells none."""
        return None

    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any) -> Batch:
        """Make a batch of packed samples, or of pairs.

        `tokens` are [B, T+1], `documents` the number of each token's document (None: attention may cross documents),
        `index` [B] the samples' numbers. Pairs are [B, S+T], S being `length`, and their documents are 0 for text and 1
        for padding. Sentences are [B, 2 N], N being `length` - 3, and their documents are 0 and 1 for the halves of
        consecutive text, 2 for text of another document, and 3 for padding. `fields` are further fields of `Tokens`:
        rng_seed, aux_loss_weight, stats, label_smoothing.
        """
        raise NotImplementedError

    def source_of(self, ids: list[int]) -> list[int]:
        """Return the source that the model reads in generation for a text of these ids."""
        return ids

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed loss over the batch's targets, in nats: a scalar of float32 or wider."""
        loss: Tensor = model(batch.tokens, batch.targets, batch.source)
        return loss


OBJECTIVES = Family("objective", ObjectiveTraits)


@OBJECTIVES.register("causal", traits=ObjectiveTraits(causal=True, source=False, random=False))
class Causal(Objective):
    """Causal language modelling (Radford et al. 2018): the next token from all before it."""

    def batch(self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any) -> Batch:
        targets = tokens[:, 1:]  # [B, T]
        if documents is not None:
            # A document's first token cannot be predicted from the document before it.
            targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE_INDEX)
            documents = documents[:, :-1]
        return Batch(Tokens.from_ids(tokens[:, :-1], documents, **fields), targets)
