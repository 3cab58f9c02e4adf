"""A `model_type` of transformers as tables: of the keys of its config.json, and of the names of its tensors.

To add one, write what differs from another by `variant`:

    QWEN3 = LLAMA.variant("qwen3", "Qwen3ForCausalLM", block={"mixer": {"qk_norm": NORM}}, tensors=QK_NORMS)

Both directions follow from the tables. An export is read again, so that each key of the model's config that the tables
do not have, or that config.json cannot say, is found, and refused by name. An import refuses each key of config.json
that transformers has for the type, that no table reads, and that differs from its default.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from xscale.convert.hf.architecture import (
    FEATURES,
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    Section,
    SentenceHeadLayout,
)
from xscale.convert.hf.tables.keys import (
    KeysRead,
    Reading,
    Table,
    Writing,
    merged,
    names_in,
    read_table,
    write_table,
)
from xscale.convert.hf.tables.stack import STACKS, StackTable, resolved
from xscale.convert.hf.tables.tensors import Absent, Tensors, weight_mappings, with_rows
from xscale.convert.mapping import WeightMapping
from xscale.core.config import decode

TRAINING_KEYS = frozenset(
    {
        "aux_loss_weight",
        "block",
        "dropout",
        "expert_dropout",
        "implementation",
        "init_std",
        "jitter",
        "max_rate",
        "max_step",
        "min_rate",
        "min_step",
        "precision",
        "z_loss_weight",
    }
)
"""Keys of xscale that do not change the logits: how a model starts, is trained or is computed."""
GENERAL_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vocab_size",
    }
)
"""Keys of config.json that say nothing of the logits, or that are read apart from a table."""


@dataclass(frozen=True)
class ModelType:
    """A `model_type` as tables."""

    name: str
    loader: str
    """The class of transformers, with the language-model head."""
    model: Table
    """Table of the `model` section."""
    tensors: Tensors
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json -> the values that an import takes; an export writes the first, unless that is null."""
    absent: Mapping[str, Absent] = field(default_factory=dict)
    """Tensors without a counterpart in xscale."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json that say nothing of the logits, besides those that all types have."""
    length_key: str = "max_position_embeddings"
    """Key of the longest text; empty: there is none."""
    writes: Callable[[Any, ModelSizes], Data] = lambda config, sizes: {}
    """Further keys of config.json that an export writes."""
    checks: tuple[Callable[[Any, Requirements], None], ...] = ()
    """Checks of the model's config on export, for limits that only the library has."""
    hf_checks: tuple[Callable[[Data, Requirements], None], ...] = ()
    """Checks of config.json on import."""
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    """Patterns of tensors that an import ignores."""
    prefix: str = ""
    notes: tuple[str, ...] = ()
    attention_span: Callable[[Any], int] = lambda config: 0
    quantization: tuple[str, ...] = ()
    objective: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    sentence_head: SentenceHeadLayout | None = None
    with_tensors: Callable[[Data, Callable[[str], Tensor | None]], Data] = lambda section, tensor: (
        section
    )
    fallbacks: tuple[tuple[str, str], ...] = ()

    def variant(
        self,
        name: str,
        loader: str,
        *,
        model: Table = None,
        block: Table = None,
        stack: Table = None,
        fixed: Mapping[str, tuple[Any, ...] | None] | None = None,
        tensors: Tensors | None = None,
        **changes: Any,
    ) -> "ModelType":
        """Return the type of that name with changes: those of tables are merged into them.

        `block` and `stack` are changes of the blocks' table and of the stack's, of every stack. A value of None in
        `fixed` takes a row away; a row of `tensors` those with one of its names.
        """
        table = merged(self.model, model or {})
        for part in STACKS:
            if isinstance(table.get(part), StackTable):
                table = {**table, part: table[part].changed(block or {}, stack or {})}
        rows = {**self.fixed, **(fixed or {})}
        return replace(
            self,
            name=name,
            loader=loader,
            model=table,
            fixed={key: values for key, values in rows.items() if values is not None},
            tensors=with_rows(self.tensors, tensors or {}),
            **changes,
        )

    def from_hf(self, data: Data, require: Requirements) -> Data:
        """Convert config.json to the `model` section; what does not map becomes a problem."""
        keys = KeysRead(data)
        for key, allowed in self.fixed.items():
            if not require.one_of(key, keys.get(key, allowed[0]), *allowed):
                continue
        for check in self.hf_checks:
            check(keys, require)
        if require.problems:
            return {}
        section: Data = read_table(self.model, Reading(keys, require))
        self._refuse_unread(keys, require)
        return section

    def _refuse_unread(self, keys: KeysRead, require: Requirements) -> None:
        """Record a problem for each key that no table reads, and that has another value than transformers' default."""
        from transformers import CONFIG_MAPPING

        defaults = CONFIG_MAPPING[self.name]().to_dict()
        honoured = (
            keys.read | names_in(self.model) | GENERAL_KEYS | self.ignored_keys | {self.length_key}
        )
        for key, default in defaults.items():
            if key not in honoured and not key.startswith("_") and dict(keys).get(key) != default:
                require.one_of(key, dict(keys).get(key), default)

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        """Convert a model's config to config.json; what does not map becomes a problem."""
        exported = resolved(config, sizes)
        if self.sentence_head is not None:
            # Its keys are those of a class of transformers.
            SentenceHeadLayout.require(config, require)
            del exported["sentence_head"]
        writing = Writing(config, sizes, require)
        fixed = {key: values[0] for key, values in self.fixed.items() if values[0] is not None}
        writing.data.update(fixed)
        write_table(self.model, [exported], "model", writing)
        for check in self.checks if not require.problems else ():
            check(config, require)
        if require.problems:
            return {}
        length = {self.length_key: sizes.length} if self.length_key else {}
        data = {"vocab_size": sizes.vocabulary, **length, **writing.data}
        data |= self.writes(config, sizes)
        known = {self.length_key: sizes.length, "pad_token_id": sizes.pad}
        section = read_table(self.model, Reading({**known, **data}, require))
        if not require.problems:
            read_again = resolved(decode(Section, {"model": section}).model, sizes)
            for path, value, other in _differences(exported, read_again, "model"):
                require.one_of(path, _shown(value), _shown(other))
        return data

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        """Map every tensor of a model's config."""
        return weight_mappings(self.tensors, self.absent, config, sizes)

    def architecture(self) -> Architecture:
        """Return what imports and exports call."""
        return Architecture(
            name=self.name,
            kind=self.model["kind"],
            loader=self.loader,
            to_hf=self.to_hf,
            from_hf=self.from_hf,
            weights=self.weights,
            prefix=self.prefix,
            ignored=self.ignored,
            fallbacks=self.fallbacks,
            with_tensors=self.with_tensors,
            notes=self.notes,
            attention_span=self.attention_span,
            features=frozenset(FEATURES),
            config_keys=frozenset(names_in(self.model) | self.fixed.keys()),
            objective=self.objective,
            overrides=self.overrides,
            quantization=self.quantization,
            sentence_head=self.sentence_head,
        )


def _differences(value: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of each key in which two resolved configs differ, except those of training."""
    key = path.rpartition(".")[2]
    if key in TRAINING_KEYS and not isinstance(value, Mapping):
        return
    if isinstance(value, Mapping) and isinstance(other, Mapping) and _shown(value) == _shown(other):
        for name in value:
            inner = path if name == "blocks" else f"{path}.{name}"
            yield from _differences(value[name], other.get(name), inner)
        return
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        inner = f"{path}.block" if value and isinstance(value[0], Mapping) else path
        for part, other_part in zip(value, other, strict=True):
            yield from _differences(part, other_part, inner)
        return
    if not _equal(key, value, other):
        yield path, value, other


def _equal(key: str, value: Any, other: Any) -> bool:
    if key == "bias_update_rate":
        # Whether there is a bias; its rate is one of training.
        return bool(value) == bool(other)
    if key == "token_types" and value == 0:
        # A table of zeros is none.
        return True
    if key == "balance_over":
        # The load of the global batch is a tensor of the router.
        return bool((value == "global_batch") == (other == "global_batch"))
    if type(value) is float and type(other) is float:
        return bool(abs(value - other) <= 1e-9 * abs(value))
    return bool(value == other)


def _shown(value: Any) -> Any:
    """Return the kind of a part, or its name, or another value as it is."""
    return value.get("kind", value.get("method", "")) if isinstance(value, Mapping) else value
