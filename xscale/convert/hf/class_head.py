"""A head of classes, of a score or of tags, in place of the language-model head: how transformers lays it out.

BERT, RoBERTa and DistilBERT have heads of the form of xscale's: a dense layer with an activation and a linear map, or a
linear map at each token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from xscale.convert.hf.architecture import (
    Architecture,
    Data,
    ModelSizes,
    Requirements,
)
from xscale.convert.hf.types.bert import BERT, DISTILBERT, ROBERTA
from xscale.convert.mapping import WeightMapping, weight, with_biases
from xscale.core.config import decode
from xscale.core.errors import ConfigError, Problem
from xscale.data.config import DataConfig
from xscale.data.source.source import SOURCES
from xscale.nn.head.class_head import ClassHead
from xscale.nn.init import Init
from xscale.nn.model.model import Model
from xscale.nn.module import name_modules, substitute

CLASSES, DENSE = "head.classes.weight", "head.dense.weight"
"""Names of the matrices of a head of classes; the second is that of its dense layer."""


@dataclass(frozen=True)
class ClassHeadNames:
    """Classes and tensors of the heads of classes that a `model_type` of transformers has."""

    architecture: Architecture
    sequences: str
    """The class that reads the first token of each sequence."""
    tokens: str
    """The class that reads each token."""
    dense: str
    """Prefix of the tensors of the dense layer, which only the first of the two has."""
    classes: str = "classifier"
    """Prefix of those of the linear map after that layer; without one it is `classifier`."""
    activation: str = "tanh"
    """Activation of the dense layer."""
    dropout: str = "classifier_dropout"
    """Key of the dropout before the linear map."""

    def weights(self, dense: bool) -> list[WeightMapping]:
        """Map the tensors of the head."""
        if not dense:
            return with_biases([weight(CLASSES, "classifier.weight")], True)
        names = {DENSE: self.dense, CLASSES: self.classes}
        return with_biases(
            [weight(name, f"{external}.weight") for name, external in names.items()], True
        )


HEADS = {
    names.architecture.name: names
    for names in (
        ClassHeadNames(
            BERT.architecture(),
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "bert.pooler.dense",
        ),
        ClassHeadNames(
            ROBERTA.architecture(),
            "RobertaForSequenceClassification",
            "RobertaForTokenClassification",
            "classifier.dense",
            "classifier.out_proj",
        ),
        ClassHeadNames(
            DISTILBERT.architecture(),
            "DistilBertForSequenceClassification",
            "DistilBertForTokenClassification",
            "pre_classifier",
            activation="relu",
            dropout="seq_classif_dropout",
        ),
    )
}
"""The architectures with such heads, by name, in the order in which they are tried."""


@dataclass(frozen=True)
class ClassHeadLayout:
    """The head of classes of a run."""

    outputs: int
    dense: bool
    objective: Data
    """The `objective` section of the run's config."""
    names: tuple[str, ...] = ()
    """Names of the classes; empty: they are unknown, or the output is a score."""

    @property
    def tags(self) -> bool:
        return bool(self.objective.get("kind") == "tag")

    @property
    def scores(self) -> bool:
        return bool(self.objective.get("kind") == "regress")

    @property
    def activation(self) -> str:
        return str(self.objective.get("dense_activation", "tanh"))

    def loader(self, names: ClassHeadNames) -> str:
        """Return the class of transformers."""
        return names.tokens if self.tags else names.sequences

    def problems(self, names: ClassHeadNames) -> list[Problem]:
        """List what the class of transformers does not have."""
        problems: list[Problem] = []
        if self.tags and self.dense:
            what = f"{names.tokens} has no dense layer before its classes"
            problems.append(
                Problem("objective.dense", what, "A run with objective.dense=false would map.")
            )
        if not self.tags and not self.dense:
            what = f"{names.sequences} has a dense layer with {names.activation} before its classes"
            problems.append(
                Problem("objective.dense", what, "A run with objective.dense=true would map.")
            )
        if not self.tags and self.dense and self.activation != names.activation:
            what = f"the dense layer of {names.sequences} has the activation {names.activation}"
            fix = f"A run with objective.dense_activation={names.activation} would map."
            problems.append(Problem("objective.dense_activation", what, fix))
        if self.objective.get("pool", "first") != "first":
            what = f"{names.sequences} reads the first token"
            problems.append(
                Problem("objective.pool", what, "A run with objective.pool=first would map.")
            )
        return problems

    def keys(self, dropout: str) -> Data:
        """Return the keys of config.json; `dropout` is that of the dropout before the classes."""
        names = (
            self.names
            if len(self.names) == self.outputs
            else [f"LABEL_{index}" for index in range(self.outputs)]
        )
        keys = {
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
            dropout: 0.0,
        }
        problem = "regression" if self.scores else "single_label_classification"
        return keys if self.tags else keys | {"problem_type": problem}

    def put(self, model: nn.Module, config: Model.Config) -> None:
        """Put such a head in place of the language-model head of a model on meta."""
        head = ClassHead(
            config.width,
            self.outputs,
            Init(std=config.init_std),
            scores=self.scores,
            dense=self.dense,
            activation=self.activation,
        )
        substitute(model, "head", head)
        name_modules(model)

    def logits(self, outputs: Tensor) -> Tensor:
        """Outputs of all tokens [B, T, C] -> those that transformers gives: of all tokens, or of the first [B, C]."""
        return outputs if self.tags else outputs[:, 0]


def class_head_of(shapes: Mapping[str, Collection[int]], config: Data) -> ClassHeadLayout | None:
    """Return the head of classes of a checkpoint with tensors of these `shapes`; None: it has no such head."""
    if CLASSES not in shapes:
        return None
    data = decode(DataConfig, config["data"])
    labels = SOURCES.of(data.source).part.labels(data.source) if data.prepared is None else None
    outputs = next(iter(shapes[CLASSES]))
    return ClassHeadLayout(
        outputs, DENSE in shapes, config["objective"], labels.names if labels else ()
    )


def present_class_head(
    architecture: str, dense: str | None, names: Collection[str]
) -> list[WeightMapping]:
    """Map those tensors of the head that a folder of an architecture has, with tensors of these `names`: the dense
    layer, and the classes if they are read from one with the same activation in both, or from none in both.

    `dense`: activation of the dense layer of the head; None: it has none.
    """
    head = HEADS.get(architecture)
    if head is None:
        return []
    activation = head.activation if f"{head.dense}.weight" in names else None
    mapping = head.weights(dense is not None) if dense == activation else []
    return [mapped for mapped in mapping if set(mapped.external_names) <= set(names)]


def body_weights(mapping: list[WeightMapping]) -> list[WeightMapping]:
    """Return the mappings of a model without those of its head."""
    return [
        mapped
        for mapped in mapping
        if not any(name.startswith("head.") for name in mapped.xscale_names)
    ]


def select_classifier(
    head: ClassHeadLayout, model: Model.Config, sizes: ModelSizes, wanted: str | None
) -> tuple[Architecture, Data]:
    """Return the architecture of a model with a head of classes, and its config.json.

    ConfigError with what it does not support.
    """
    if wanted is not None and wanted not in HEADS:
        what = f"'{wanted}' has no mapping for the head of classes that objective '{head.objective.get('kind')}' trains"
        raise ConfigError("--architecture", what, f"Take one of {', '.join(HEADS)}.")
    tried: list[list[Problem]] = []
    for names in HEADS.values() if wanted is None else [HEADS[wanted]]:
        require, data = Requirements(head.loader(names)), Data()
        if require.one_of("model", model.kind, names.architecture.kind):
            data = names.architecture.to_hf(
                _with_language_head(model, names.architecture), sizes, require
            )
        problems = [*require.problems, *head.problems(names)]
        if not problems:
            return _with_classes(head, names), {
                **_start(head, names),
                **data,
                **head.keys(names.dropout),
            }
        tried.append(problems)
    nearest = min(tried, key=len)
    raise ConfigError(dict.fromkeys(nearest))


def _with_classes(head: ClassHeadLayout, names: ClassHeadNames) -> Architecture:
    """Return the architecture with the head in place of its language-model head."""

    def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        return [
            *body_weights(names.architecture.weights(config, sizes)),
            *names.weights(head.dense),
        ]

    loader = head.loader(names)
    return replace(
        names.architecture, loader=loader, weights=weights, class_head=head, sentence_head=None
    )


def _start(head: ClassHeadLayout, names: ClassHeadNames) -> Data:
    return {
        "model_type": names.architecture.name,
        "architectures": [head.loader(names)],
        "dtype": "float32",
    }


def _with_language_head(model: Any, architecture: Architecture) -> Any:
    """Return the config with the architecture's language-model head: a run on labels has none, so that its keys do not
    matter."""
    ffn = model.stack.block_config(0).ffn
    transform = "gelu" if architecture is ROBERTA else getattr(ffn, "activation", model.transform)
    return model.model_copy(update={"head_bias": True, "transform": transform, "tied": True})
