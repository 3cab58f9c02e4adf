"""An architecture of the transformers library: conversion of configs and tensor names in both directions.

`Requirements` collects every key of a config that cannot be converted.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from xscale.convert.mapping import WeightMapping, weight, with_biases
from xscale.core.config import Config, Slot
from xscale.core.errors import Problem
from xscale.nn.model.model import MODELS, Model


@dataclass
class Requirements:
    """Collects problems, so that all of them are reported at once."""

    architecture: str
    problems: list[Problem] = field(default_factory=list)

    def one_of(self, path: str, value: Any, *allowed: Any) -> bool:
        """Return whether `value` is allowed; otherwise record a problem of the key `path`."""
        if value in allowed:
            return True
        choices = " or ".join(_text(choice) for choice in allowed)
        what = f"{self.architecture} does not support {_text(value)}"
        self.reject(path, what, f"{choices} would map.")
        return False

    def reject(self, path: str, what: str, fix: str) -> None:
        """Record a problem, once."""
        problem = Problem(path, what, fix)
        if problem not in self.problems:
            self.problems.append(problem)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Section(Config):
    """The part of a run's config that is converted."""

    model: Annotated[Model.Config, Slot(MODELS)]
    """The network."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that its config section does not contain."""

    vocabulary: int
    length: int
    pad: int = 0
    """Padding id, after which some architectures start to count positions."""
    eos: int = 2
    """End-of-text id, from which some architectures start to write."""


Data = dict[str, Any]


@dataclass(frozen=True)
class SentenceHeadLayout:
    """The class of transformers with a head that classifies pairs of sentences, beside the language-model head."""

    loader: str
    pooler: str
    """Prefix of the tensors of the pooler."""
    classifier: str
    """Prefix of those of the classifier, which has two classes."""
    output: str
    """Name of its logits among the outputs."""

    def weights(self) -> list[WeightMapping]:
        """Map the tensors of the head."""
        pooler = weight("head.sentence.pooler.dense.weight", f"{self.pooler}.weight")
        return with_biases(
            [pooler, weight("head.sentence.classifier.weight", f"{self.classifier}.weight")], True
        )

    @staticmethod
    def require(config: Any, require: Requirements) -> None:
        """Record a problem where the model has a head of other classes."""
        if config.sentence_head is not None:
            require.one_of("model.sentence_head.classes", config.sentence_head.classes, 2)


@dataclass(frozen=True)
class Architecture:
    """A `model_type` of transformers."""

    name: str
    """`model_type` in config.json."""
    kind: str
    """The kind of xscale's model."""
    loader: str
    """The class of transformers, with the language-model head."""
    to_hf: Callable[[Any, ModelSizes, Requirements], Data]
    """Convert xscale's model config to the keys of config.json; what does not map becomes a problem."""
    from_hf: Callable[[Data, Requirements], Data]
    """Convert config.json (with defaults filled in) to the `model` section; what does not map becomes a problem."""
    weights: Callable[[Any, ModelSizes], list[WeightMapping]]
    """Map every tensor of xscale's model config."""
    prefix: str = ""
    """Prefix of the names that files of the model without head omit."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that the mapping ignores: computed tables, heads of other tasks."""
    fallbacks: tuple[tuple[str, str], ...] = ()
    """Tensors that may be missing from the file, each with the tensor used instead (tied weights)."""
    with_tensors: Callable[[Data, Callable[[str], Tensor | None]], Data] = lambda section, tensor: (
        section
    )
    """Complete the `model` section by the tensors of the file; `tensor(name)` returns one, or None."""
    notes: tuple[str, ...] = ()
    """Notes for users of the exported model."""
    attention_span: Callable[[Any], int] = lambda config: 0
    """Window of a token, in tokens, for models with local attention: the logits are compared beyond it."""
    features: frozenset[str] = frozenset()
    """Keys of `FEATURES` that the mapping reads; of the others only the defaults map."""
    without_capacity: Callable[[Any], Any] = lambda config: config
    """Return the config without expert capacity, which an export removes; used to compare logits."""
    config_keys: frozenset[str] = frozenset()
    """Keys of config.json that are honoured."""
    inputs: Callable[[Any, Tensor], dict[str, Tensor]] = lambda config, ids: {}
    """Inputs of the library's model besides ids [B, T], for the comparison of the logits."""
    objective: str | None = None
    """Objective of an imported run if no config is given; None: the usual one of the model's kind."""
    keeps_z_loss: bool = False
    """Whether config.json has a weight of the router's z-loss."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the values under which the logits are compared."""
    quantization: tuple[str, ...] = ()
    """Formats of quantised weights, by `quantization_config.quant_method` in config.json, that an import reads."""
    sentence_head: SentenceHeadLayout | None = None
    """Layout of the weights that `sentence_head` maps to; None: there is none."""
    class_head: Any = None
    """The `ClassHeadLayout` of a head in place of the language-model head; None: the model has that."""

    def loader_of(self, config: Any) -> str:
        """Return the class of transformers with the heads that xscale's model config has."""
        has_head = getattr(config, "sentence_head", None) is not None
        return (
            self.sentence_head.loader
            if has_head and self.sentence_head is not None
            else self.loader
        )


FEATURES: dict[str, Any] = {
    "scale_embeddings": False,
    "fix_norm": False,
    "logit_soft_cap": None,
    "mup": None,
    "mtp": None,
    "position.scaling": None,
    "embedding_width": None,
    "sentence_head": None,
    "boundary_head": None,
    "transparent": False,
    **{
        f"{stack}.{key}": default
        for stack in ("stack", "encoder", "decoder")
        for key, default in (
            ("share", "none"),
            ("linear_maps", "real"),
            ("step_signal", False),
            ("halting", None),
            ("exits", None),
            ("mask_decoder", None),
            ("pooling", None),
        )
    },
    "block.sublayers": None,
    "block.position": None,
    "block.mixer.scale": None,
    "block.mixer.qk_norm_over": "head",
    "block.mixer.position": None,
    "block.mixer.core.soft_cap": None,
    "block.mixer.core.sinks": False,
    **{
        f"block.ffn{part}.{key}": default
        for part in ("", ".expert", ".shared")
        for key, default in (("clamp_value", None), ("linear_offset", 0.0))
    },
    "block.ffn.router.logit_bias": False,
}
"""Keys that few architectures have -> their defaults. `block` is each block of each stack."""


def require_features(config: Any, supported: Collection[str], require: Requirements) -> None:
    """Record a problem for each key of `FEATURES` that is not at its default and not `supported`."""
    stacks = [name for name in ("stack", "encoder", "decoder") if hasattr(config, name)]
    for key, default in FEATURES.items():
        if key in supported:
            continue
        if not key.startswith("block."):
            _require_default(config, key.split("."), f"model.{key}", default, require)
            continue
        for name in stacks:
            stack = getattr(config, name)
            blocks = [stack.block_config(layer) for layer in range(stack.depth)]
            names = key.split(".")[1:]
            if any(_value(block, names, default) != default for block in blocks):
                block = next(block for block in blocks if _value(block, names, default) != default)
                _require_default(block, names, f"model.{name}.{key}", default, require)


def _require_default(
    config: Any, names: list[str], path: str, default: Any, require: Requirements
) -> None:
    value = _value(config, names, default)
    if value != default:
        name = getattr(value, "method", None) or getattr(value, "kind", None) or value
        require.one_of(path, name, default)


def _value(config: Any, names: list[str], default: Any) -> Any:
    """Value of the dotted key in a config; `default` where a part on the way has no such key."""
    for name in names:
        if not hasattr(config, name):
            return default
        config = getattr(config, name)
    return config


def uniform_block(stack: Any, require: Requirements, path: str) -> Any:
    """Return the stack's block; record a problem if the blocks are not all equal."""
    block = stack.block_config(0)
    if any(stack.block_config(layer) != block for layer in range(stack.depth)):
        require.reject(
            f"{path}.rules",
            f"{require.architecture} needs equal blocks",
            "A stack without rules would map.",
        )
    return block


def activation_of(hf_name: str, require: Requirements, path: str) -> str:
    """Convert the name of an activation from transformers to xscale."""
    names = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    names |= {"silu": "swish", "swish": "swish"}
    if hf_name not in names:
        require.one_of(path, hf_name, *names)
    return names.get(hf_name, "gelu")


ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "swish": "silu"}
"""Activations: name in xscale -> name in transformers."""
