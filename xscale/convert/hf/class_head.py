"""A head of classes, of a score or of tags, in place of the language-model head: how transformers lays it out.

BERT alone has heads of the form of xscale's: a pooler and a linear map, or a linear map at each token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from xscale.convert.hf.architecture import Architecture, Data, ModelSizes, Requirements, require_features
from xscale.convert.hf.bert import BERT
from xscale.convert.mapping import WeightMapping, weight, with_biases
from xscale.core.config import decode
from xscale.core.errors import ConfigError, Problem
from xscale.data.config import DataConfig
from xscale.data.source.source import SOURCES
from xscale.nn.class_head import ClassHead
from xscale.nn.init import Init
from xscale.nn.model.model import Model
from xscale.nn.module import name_modules, substitute

CLASSES, DENSE = "head.classes.weight", "head.dense.weight"
"""Names of the matrices of a head of classes; the second is that of its dense layer."""
POOLER, CLASSIFIER = "bert.pooler.dense", "classifier"
"""Prefixes of the tensors of BERT's pooler and of its classifier."""
SEQUENCES, TOKENS = "BertForSequenceClassification", "BertForTokenClassification"


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
    def loader(self) -> str:
        return TOKENS if self.tags else SEQUENCES

    def problems(self) -> list[Problem]:
        """List what the class of transformers does not have."""
        problems: list[Problem] = []
        if self.tags and self.dense:
            what = f"{TOKENS} has no dense layer before its classes"
            problems.append(Problem("objective.dense", what, "A run with objective.dense=false would map."))
        if not self.tags and not self.dense:
            what = f"{SEQUENCES} has a dense layer with tanh before its classes, the pooler"
            problems.append(Problem("objective.dense", what, "A run with objective.dense=true would map."))
        if self.objective.get("pool", "first") != "first":
            what = f"{SEQUENCES} reads the first token"
            problems.append(Problem("objective.pool", what, "A run with objective.pool=first would map."))
        return problems

    def keys(self) -> Data:
        """Return the keys of config.json."""
        names = self.names if len(self.names) == self.outputs else [f"LABEL_{index}" for index in range(self.outputs)]
        keys = {
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
            "classifier_dropout": 0.0,
        }
        problem = "regression" if self.scores else "single_label_classification"
        return keys if self.tags else keys | {"problem_type": problem}

    def put(self, model: nn.Module, config: Model.Config) -> None:
        """Put such a head in place of the language-model head of a model on meta."""
        head = ClassHead(config.width, self.outputs, Init(std=config.init_std), scores=self.scores, dense=self.dense)
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
    return ClassHeadLayout(outputs, DENSE in shapes, config["objective"], labels.names if labels else ())


def class_head_weights(dense: bool) -> list[WeightMapping]:
    """Map the tensors of the head."""
    pooler = [weight(DENSE, f"{POOLER}.weight")] * dense
    return with_biases([*pooler, weight(CLASSES, f"{CLASSIFIER}.weight")], True)


def present_class_head(dense: bool, names: Collection[str]) -> list[WeightMapping]:
    """Map those tensors of the head that a folder has, with tensors of these `names`: the pooler, and the classifier if
    it reads a pooler's output in both or in none."""
    has_pooler = f"{POOLER}.weight" in names
    mapping = class_head_weights(dense) if dense == has_pooler else []
    return [mapped for mapped in mapping if set(mapped.external_names) <= set(names)]


def body_weights(mapping: list[WeightMapping]) -> list[WeightMapping]:
    """Return the mappings of a model without those of its head."""
    return [mapped for mapped in mapping if not any(name.startswith("head.") for name in mapped.xscale_names)]


def select_classifier(
    head: ClassHeadLayout, model: Model.Config, sizes: ModelSizes, wanted: str | None
) -> tuple[Architecture, Data]:
    """Return the architecture of a model with a head of classes, and its config.json.

    ConfigError with what it does not support.
    """
    if wanted not in (None, BERT.name):
        what = f"'{wanted}' has no mapping for the head of classes that objective '{head.objective.get('kind')}' trains"
        raise ConfigError("--architecture", what, f"Take {BERT.name}, which is exported as {head.loader}.")
    require = Requirements(head.loader)
    data: Data = {}
    if require.one_of("model", model.kind, BERT.kind):
        require_features(model, (), require)
        data = BERT.to_hf(_with_bert_head(model), sizes, require)
    if problems := [*require.problems, *head.problems()]:
        raise ConfigError(list(dict.fromkeys(problems)))

    def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        return [*body_weights(BERT.weights(config, sizes)), *class_head_weights(head.dense)]

    architecture = replace(BERT, loader=head.loader, weights=weights, class_head=head, sentence_head=None)
    start = {"model_type": BERT.name, "architectures": [head.loader], "dtype": "float32"}
    return architecture, start | data | head.keys()


def _with_bert_head(model: Any) -> Any:
    """Return the config with BERT's language-model head: a run on labels has none, so that its keys do not matter."""
    ffn = model.stack.block_config(0).ffn
    transform = getattr(ffn, "activation", model.transform)
    return model.model_copy(update={"head_bias": True, "transform": transform, "tied": True})
