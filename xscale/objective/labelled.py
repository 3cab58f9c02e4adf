"""Objectives on labelled examples, for fine-tuning (Devlin et al. 2019, section 4): `classify`, `regress` and `tag`.

A head of classes or of a score takes the place of the language-model head. The model predicts at one token of each
example, or at each word; all other targets are ignored.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens
from xscale.objective.metrics import class_metrics, marks_spans, score_metrics, span_metrics
from xscale.objective.objective import (
    OBJECTIVES,
    Batch,
    HeadSizes,
    Objective,
    ObjectiveTraits,
    SpecialTokens,
)


class LabelledObjective(Objective):
    """Base class of the objectives on labelled examples."""

    class Config(Objective.Config):
        dense: bool = False
        """Whether a dense layer precedes the outputs, as the pooler of BERT does."""
        dense_activation: Literal["tanh", "relu"] = "tanh"
        """Activation of that layer: tanh, as in BERT and RoBERTa; relu, as in DistilBERT."""

    @classmethod
    def check(
        cls, config: Config, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = []
        if config.z_loss_weight:
            what = "keeps the logits of a vocabulary small, and labels have none"
            problems.append(Problem(f"{path}.z_loss_weight", what, choices=take(0.0)))
        if not config.dense and config.dense_activation != "tanh":
            what = "is the activation of a dense layer, and there is none"
            choices = take("tanh") + take(True, key=f"{path}.dense")
            problems.append(Problem(f"{path}.dense_activation", what, choices=choices))
        return problems

    def batch(
        self,
        tokens: Tensor,
        documents: Tensor | None,
        index: Tensor,
        *,
        labels: Tensor | None = None,
        **fields: Any,
    ) -> Batch:
        """`tokens` and `documents` [B, T], which are 0 for text and 1 for padding; `labels` are those of `Samples`."""
        assert documents is not None, "padding is told from text by its document"
        assert labels is not None, "examples have labels"
        types = self.types(tokens, documents)
        padded = Tokens.from_ids(tokens, documents, padding=documents != 0, types=types, **fields)
        return Batch(padded, self.targets(documents, labels))

    def types(self, tokens: Tensor, documents: Tensor) -> Tensor | None:
        """Return the types [B, T] of tokens and documents, both [B, T]; None: every token has the first type."""
        return None

    def targets(self, documents: Tensor, labels: Tensor) -> Tensor:
        """Documents [B, T] and labels [B, 1] or [B, T] -> targets [B, T]."""
        raise NotImplementedError


class _Pooled(LabelledObjective):
    class Config(LabelledObjective.Config):
        pool: Literal["first", "last"] = "first"
        """Token whose output stands for the example. first: the beginning-of-text token, as [CLS] in BERT. last: the
        last end-of-document token, as in GPT (Radford et al. 2018), for causal models, in which it alone has read all.
        """
        pair_types: bool = False
        """Whether the second of two texts, with its end-of-document token, has the second token type, as the segments
        of BERT; the model needs token_types of 2."""

    @classmethod
    def check_model(cls, config: Config, *, causal: bool, path: str) -> list[Problem]:
        if causal and config.pool == "first":
            what = "the first token of a causal model has read no other"
            choices = take("last") + take("encoder", key="model.kind")
            return [Problem(f"{path}.pool", what, choices=choices)]
        return []

    def types(self, tokens: Tensor, documents: Tensor) -> Tensor | None:
        if not self.config.pair_types:
            return None
        ends = (tokens == self.specials.eos).long()
        is_second = (ends.cumsum(1) - ends > 0) & (documents == 0)
        return is_second.long()

    def targets(self, documents: Tensor, labels: Tensor) -> Tensor:
        at = torch.zeros_like(labels, dtype=torch.long)
        if self.config.pool == "last":
            at = (documents == 0).sum(1, keepdim=True) - 1
        targets = torch.full(documents.shape, IGNORE_INDEX, dtype=labels.dtype)
        return targets.scatter(1, at, labels)


@OBJECTIVES.register(
    "classify",
    traits=ObjectiveTraits(
        causal=None, source=False, random=False, samples="labels", labels="class"
    ),
)
class Classify(_Pooled):
    """Classification: cross-entropy of the class of each example; of one text, or of a pair of texts."""

    class Config(_Pooled.Config):
        classes: int = Field(default=2, ge=2)
        """Number of classes, which is that of the data."""

    @classmethod
    def head_sizes(cls, config: Config) -> HeadSizes:
        return HeadSizes(
            config.classes, dense=config.dense, activation=config.dense_activation, per_example=True
        )

    def metrics(self, predicted: Tensor, targets: Tensor) -> dict[str, float]:
        return class_metrics(predicted, targets, self.config.classes)


@OBJECTIVES.register(
    "regress",
    traits=ObjectiveTraits(
        causal=None, source=False, random=False, samples="labels", labels="score"
    ),
)
class Regress(_Pooled):
    """Regression: squared error of the score of each example; of one text, or of a pair of texts."""

    @classmethod
    def check(
        cls, config: Any, specials: SpecialTokens | None, length: int, path: str
    ) -> list[Problem]:
        problems = super().check(config, specials, length, path)
        if config.label_smoothing:
            what = "scores have no distribution to smooth"
            problems.append(Problem(f"{path}.label_smoothing", what, choices=take(0.0)))
        return problems

    @classmethod
    def head_sizes(cls, config: Any) -> HeadSizes:
        dense, activation = config.dense, config.dense_activation
        return HeadSizes(1, scores=True, dense=dense, activation=activation, per_example=True)

    def metrics(self, predicted: Tensor, targets: Tensor) -> dict[str, float]:
        return score_metrics(predicted, targets)


@OBJECTIVES.register(
    "tag",
    traits=ObjectiveTraits(
        causal=None, source=False, random=False, samples="labels", labels="tags"
    ),
)
class Tag(LabelledObjective):
    """Tagging: cross-entropy of the tag of each word, at its first token.

    Tags that mark spans (`B-PER`, `I-PER`, `O`) have the metric of CoNLL 2003 (Tjong Kim Sang and De Meulder
    2003) too: precision, recall and F1 of spans.
    """

    class Config(LabelledObjective.Config):
        classes: int = Field(default=2, ge=2)
        """Number of tags, which is that of the data."""

    @classmethod
    def head_sizes(cls, config: Config) -> HeadSizes:
        return HeadSizes(config.classes, dense=config.dense, activation=config.dense_activation)

    def targets(self, documents: Tensor, labels: Tensor) -> Tensor:
        return labels

    def metrics(self, predicted: Tensor, targets: Tensor) -> dict[str, float]:
        return class_metrics(predicted, targets, self.config.classes)

    def sequence_metrics(
        self, predicted: Tensor, targets: Tensor, samples: Tensor, names: Sequence[str]
    ) -> dict[str, float]:
        return span_metrics(predicted, targets, samples, names) if marks_spans(names) else {}
