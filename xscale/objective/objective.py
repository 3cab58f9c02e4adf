"""Training objectives, which turn packed samples into inputs and targets and compute the loss; `causal`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from xscale.core import config as schema
from xscale.core.config import FractionBelowOne, NonNegativeFloat
from xscale.core.errors import Problem
from xscale.core.registry import Family
from xscale.core.requirements import KeyNeed
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens

Samples = Literal["packed", "pairs", "sentences", "labels"]
"""Kinds of samples: packed text; pairs of a source and a target, each padded to its length; sentences, which are
consecutive text in two halves and text of another document; and labelled examples, padded to their length."""


@dataclass(frozen=True)
class ObjectiveTraits:
    """Requirements of an objective on the model, and its properties."""

    causal: bool | None
    """Needs a causal model; otherwise a bidirectional one; None: either."""
    source: bool
    """Needs a model that reads a source sequence."""
    random: bool
    """Corrupts inputs at random, seeded by the sample's number, so that every layout corrupts the same tokens."""
    padded: bool = False
    """Batches of packed text end in padding, which is a document of its own, also where attention may cross the
    documents of a sample."""
    prefix: bool = False
    """Needs a model whose tokens all see a prefix of their document (`Tokens.prefix`), as a prompt is in generation."""
    samples: Samples = "packed"
    """Kind of the samples: packed text, pairs of a source and a target, or another one that `Samples` names."""
    labels: Literal["class", "score", "tags"] | None = None
    """Kind of the labels of labelled examples; None: the samples are no labelled examples."""

    @property
    def records(self) -> Literal["text", "pairs", "labels"]:
        """Content of the documents of which the samples are made, which is a trait of sources."""
        return self.samples if self.samples in ("pairs", "labels") else "text"


@dataclass(frozen=True)
class HeadSizes:
    """The head that an objective puts in place of the language-model head."""

    outputs: int
    """Classes, or 1 for a score."""
    scores: bool = False
    """Whether the output is a score, and not the logit of a class."""
    dense: bool = False
    """Whether a dense layer precedes the outputs."""
    activation: str = "tanh"
    """Activation of that layer: tanh or relu."""
    per_example: bool = False
    """Whether one token of each example predicts for all of it; otherwise a token predicts for itself or its word."""


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
    sentence_ends: frozenset[int] = frozenset()
    """Tokens whose text ends in a full stop."""
    fim: tuple[int, int, int] | None = None
    """Tokens before prefix, suffix and middle that the tokenizer has for filling in; None: it has none of its own."""

    def is_text(self, ids: Tensor) -> Tensor:
        """Whether each of `ids` is no special token, of the same shape."""
        special = [self.pad, self.eos, self.mask, self.bos, *self.sentinels, *(self.fim or ())]
        return ~torch.isin(ids, torch.tensor([token for token in special if token is not None]))


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one micro-batch."""

    tokens: Tokens
    targets: Tensor
    """[B, T] ids of tokens or classes, or scores (float64); -100 is ignored."""
    source: Tokens | None = None
    counted: int | None = None
    """`weight`, where it was counted before the batch went to a device; None: not counted yet."""
    places: Tensor | None = None
    """[B, T, 2] number of each target's sample, and its index there, in an evaluation; None: not told."""

    @property
    def weight(self) -> Tensor:
        """Number of targets that are not ignored; the step's loss is the summed loss over the sum of these."""
        return (self.targets != IGNORE_INDEX).sum()

    @property
    def target_count(self) -> int:
        """`weight` as a number, for which the host waits for a device unless it was `counted` before."""
        return int(self.weight) if self.counted is None else self.counted

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device."""
        source = None if self.source is None else self.source.to(device)
        targets = self.targets.to(device, non_blocking=True)
        places = None if self.places is None else self.places.to(device, non_blocking=True)
        return Batch(self.tokens.to(device), targets, source, self.counted, places)

    def with_places(self, index: Tensor) -> "Batch":
        """Return a copy that tells the places of its targets. `index` [B]: the numbers of the samples."""
        rows = torch.arange(self.targets.shape[1]).expand(self.targets.shape)
        return replace(self, places=torch.stack((index[:, None].expand_as(rows), rows), -1))


class Objective:
    """Built as `Objective(config, specials, length, seed)`."""

    class Config(schema.Config):
        label_smoothing: FractionBelowOne = 0.0
        """Probability that the training loss spreads evenly over the vocabulary, taken from the target (Szegedy et al.
        2016); evaluations report the loss without it."""

        z_loss_weight: NonNegativeFloat = 0.0
        """Weight in the training loss of the square of each target's log-sum-exp of the logits, which keeps them small
        (z-loss; Chowdhery et al. 2022, PaLM, take 1e-4); evaluations report the loss without it."""

    predicts_length: ClassVar[bool] = False
    """Whether the source tells the lengths of the targets (`xscale.nn.head.length_head`), for a length head."""

    def __init__(self, config: Any, specials: SpecialTokens, length: int, seed: int) -> None:
        self.config = config
        self.specials = specials
        self.length = length
        self.seed = seed

    @classmethod
    def check(
        cls, config: Any, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        """List the problems with samples of `length` tokens; `specials` is None before the tokenizer is known."""
        return []

    @classmethod
    def classes(cls, config: Any) -> int | None:
        """Return the number of classes of a sequence, which a sentence head predicts; None: there are none."""
        return None

    @classmethod
    def check_model(cls, config: Any, *, causal: bool, path: str) -> list[Problem]:
        """List the problems with a model that is causal, or bidirectional."""
        return []

    @classmethod
    def needs(cls, config: Any) -> list[KeyNeed]:
        """List what the objective needs of the data, of the layout and of the rest of a recipe."""
        entry = OBJECTIVES.of(config)
        if entry.traits.samples == "packed":
            return []
        return [
            KeyNeed(
                "data.cross_documents",
                (False,),
                f"'{entry.name}' hides padding as a document of its own",
            )
        ]

    @classmethod
    def head_sizes(cls, config: Any) -> HeadSizes | None:
        """Return the head that takes the place of the language-model head; None: that one stays."""
        return None

    def metrics(self, predicted: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of predicted classes or scores [N] by name, of an objective with a head of its own."""
        raise NotImplementedError

    def sequence_metrics(
        self, predicted: Tensor, targets: Tensor, samples: Tensor, names: Sequence[str]
    ) -> dict[str, float]:
        """Return further metrics by name, which depend on the order of the predictions [N] in their samples.

        `samples` [N]: the sample of each, equal ones adjacent. `names` of the classes or tags by number; scores have
        none.
        """
        return {}

    @classmethod
    def max_span(cls, config: Any) -> int | None:
        """Return the longest masked span, by the ends of which a boundary head predicts; None: it tells none."""
        return None

    @classmethod
    def sentences(cls, config: Any, length: int) -> int | None:
        """Return the sentences of a sample that global tokens stand for; None: there are none."""
        return None

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        """Make a batch of packed samples, of pairs, or of labelled examples.

        `tokens` are [B, T+1], `documents` the number of each token's document (None: attention may cross documents),
        `index` [B] the samples' numbers. Pairs are [B, S+T], S being `length`, and their documents are 0 for text and 1
        for padding. Sentences are [B, 2 N], N being `length` - 3, and their documents are 0 and 1 for the halves of
        consecutive text, 2 for text of another document, and 3 for padding. Labelled examples are [B, T], with
        documents 0 and 1 as those of pairs, and `labels`. `fields` are further fields of `Tokens`, such as the
        `forward` of the micro-batch, for `Tokens.from_ids`.
        """
        raise NotImplementedError

    @property
    def start(self) -> int:
        """Token that stands before the first one that a model with a source writes: padding, as in T5."""
        return self.specials.pad

    def source_of(self, ids: list[int]) -> list[int]:
        """Return the source that the model reads in generation for a text of these ids."""
        return ids

    def prompt_of(self, ids: list[int]) -> list[int]:
        """Return what a model without a source reads in generation for a prompt of these ids."""
        return ids

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed loss over the batch's targets, in nats: a scalar of float32 or wider."""
        loss: Tensor = model(batch.tokens, batch.targets, batch.source)
        return loss


OBJECTIVES = Family("objective", ObjectiveTraits, Objective)


@OBJECTIVES.register("causal", traits=ObjectiveTraits(causal=True, source=False, random=False))
class Causal(Objective):
    """Causal language modelling (Radford et al. 2018): the next token from all before it."""

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        targets = tokens[:, 1:]  # [B, T]
        if documents is not None:
            # A document's first token cannot be predicted from the document before it.
            targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE_INDEX)
            documents = documents[:, :-1]
        return Batch(Tokens.from_ids(tokens[:, :-1], documents, **fields), targets)
