"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), XLM-R and CamemBERT, and the tables of models of their kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import Data, SentenceHeadLayout
from xscale.convert.hf.tables.keys import (
    Computed,
    KeyMapping,
    Reading,
    Renamed,
    SameKey,
    Table,
    Writing,
    one_value,
)
from xscale.convert.hf.tables.model_type import ModelType
from xscale.convert.hf.tables.stack import StackTable
from xscale.convert.hf.tables.tensors import Moved, RowContext, Rows, blocks
from xscale.convert.hf.types.layer_norm import ACTIVATIONS
from xscale.convert.mapping import (
    DUPLICATED,
    IDENTITY,
    Transform,
    positions_and_types,
    rows_before,
)

TYPES = "token types: every token has the first type, unless an objective on sentences told others"


@dataclass(frozen=True)
class TokenTypes(KeyMapping):
    """The rows of the table of token types; a model without one is exported with rows of zeros."""

    rows: int
    key: str = "type_vocab_size"

    def read(self, reading: Reading, name: str) -> int:
        return int(reading.data[self.key])

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        writing.put(self.key, one_value(values, path, writing) or self.rows, path)

    def names(self) -> set[str]:
        return {self.key}


def length_after_padding(data: Data) -> int:
    return int(data["max_position_embeddings"] - (data["pad_token_id"] or 0) - 1)


AFTER_PADDING = Computed(
    lambda reading: length_after_padding(reading.data),
    lambda length, writing: {"max_position_embeddings": length + writing.sizes.pad + 1},
    ("max_position_embeddings",),
)
"""The number of positions, where the table has unused rows up to that of the padding id."""


def encoder(keys: Mapping[str, str] | None = None, **changes: Any) -> Table:
    """Return the table of a masked language model, with other names for keys of BERT's config.json."""

    def key(name: str) -> str:
        return (keys or {}).get(name, name)

    norm = {"kind": "layer", "eps": SameKey("layer_norm_eps"), "bias": True}
    norm |= changes.pop("norm", {})
    activation = Renamed(key("hidden_act"), ACTIVATIONS)
    block = {
        "mixer": {
            "kind": "attention",
            "heads": SameKey(key("num_attention_heads")),
            "core": {"kind": "softmax"},
            "bias": True,
            "dropout": SameKey(key("attention_probs_dropout_prob")),
        },
        "ffn": {
            "kind": "dense",
            "hidden": SameKey(key("intermediate_size")),
            "activation": activation,
            "bias": True,
        },
        "norm": norm,
        "residual": "post",
        "dropout": SameKey(key("hidden_dropout_prob")),
    }
    return {
        "kind": "encoder",
        "width": SameKey(key("hidden_size")),
        "position": {"kind": "learned", "length": SameKey("max_position_embeddings")},
        "tied": SameKey("tie_word_embeddings"),
        "dropout": SameKey(key("hidden_dropout_prob")),
        "init_std": SameKey("initializer_range"),
        "embedding_norm": norm,
        "token_types": TokenTypes(2),
        "transform": activation,
        "head_bias": True,
        "stack": StackTable(key("num_hidden_layers"), block),
        **changes,
    }


LAYER: Rows = {
    "mixer.part.q": "attention.self.query",
    "mixer.part.k": "attention.self.key",
    "mixer.part.v": "attention.self.value",
    "mixer.part.o": "attention.output.dense",
    "mixer.norm": "attention.output.LayerNorm",
    "ffn.part.up": "intermediate.dense",
    "ffn.part.down": "output.dense",
    "ffn.norm": "output.LayerNorm",
}


def tensors(
    body: str,
    dense: str,
    norm: str,
    bias: str,
    *,
    types: int = 2,
    offset: bool = False,
    decoder: str = "",
) -> Rows:
    """Return the rows of a masked language model.

    `body` is the prefix of the model without its head, whose dense layer, norm and bias follow. `types` are the rows of
    a table of token types that an export of a model without one writes; 0: the library has none. `offset`: positions
    begin after the padding id. `decoder`: prefix of an untied head, by default beside its bias.
    """
    embeddings = f"{body}.embeddings"
    positions, table = (
        f"{embeddings}.position_embeddings.weight",
        f"{embeddings}.token_type_embeddings.weight",
    )
    untied = decoder or f"{bias.rpartition('.')[0]}.decoder"

    def has_zeros(row: RowContext) -> bool:
        return bool(types) and not row.config.token_types

    def position_rows(row: RowContext) -> Transform:
        unused = row.sizes.pad + 1 if offset else 0
        return positions_and_types(unused, types) if has_zeros(row) else rows_before(unused)

    return {
        "embed.table": f"{embeddings}.word_embeddings",
        "embed.position.weight": Moved(
            lambda row: f"{positions} {table}" if has_zeros(row) else positions, position_rows
        ),
        "embed.types": table,
        "embed.norm": f"{embeddings}.LayerNorm",
        "head.transform.dense": dense,
        "head.transform.norm": norm,
        "head.weight": f"{untied}.weight",
        # The library ties the two biases if, and only if, it ties the weights; it adds the decoder's.
        "head.bias": Moved(
            lambda row: bias if row.config.tied else f"{untied}.bias {bias}",
            lambda row: IDENTITY if row.config.tied else DUPLICATED,
        ),
        **blocks("stack.blocks.{i}", f"{body}.encoder.layer.{{i}}", LAYER),
    }


def sentence_rows(layout: SentenceHeadLayout) -> Rows:
    return {
        "head.sentence.pooler.dense": layout.pooler,
        "head.sentence.classifier": layout.classifier,
    }


NEXT_SENTENCE = SentenceHeadLayout(
    "BertForPreTraining", "bert.pooler.dense", "cls.seq_relationship", "seq_relationship_logits"
)
CLS = tuple(
    f"cls.predictions.{name}" for name in ("transform.dense", "transform.LayerNorm", "bias")
)
"""Tensors of BERT's language-model head."""
LM_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
"""Those of RoBERTa's."""
OTHER_HEADS = frozenset({"classifier_dropout"})
BERT = ModelType(
    name="bert",
    loader="BertForMaskedLM",
    model=encoder(),
    tensors=tensors("bert", *CLS) | sentence_rows(NEXT_SENTENCE),
    fixed={
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": (None, "absolute"),
    },
    ignored=(
        r".*\.position_ids",
        r".*\.pooler\..*",
        r"cls\.seq_relationship\..*",
        r"(cls\.predictions|lm_head)\.decoder\.(bias|weight)",
    ),
    ignored_keys=OTHER_HEADS,
    notes=(TYPES,),
    sentence_head=NEXT_SENTENCE,
)
ROBERTA = BERT.variant(
    "roberta",
    "RobertaForMaskedLM",
    model={
        "position": {"length": AFTER_PADDING},
        "token_types": TokenTypes(1),
        "transform": "gelu",
    },
    tensors=tensors("roberta", *LM_HEAD, types=1, offset=True),
    sentence_head=None,
)
XLM_ROBERTA = ROBERTA.variant("xlm-roberta", "XLMRobertaForMaskedLM")
CAMEMBERT = ROBERTA.variant("camembert", "CamembertForMaskedLM")
ROBERTA_PRELAYERNORM = ROBERTA.variant(
    "roberta-prelayernorm",
    "RobertaPreLayerNormForMaskedLM",
    block={"residual": "pre"},
    tensors=tensors("roberta_prelayernorm", *LM_HEAD, types=1, offset=True)
    | {"stack.norm": "roberta_prelayernorm.LayerNorm"}
    | blocks(
        "stack.blocks.{i}",
        "roberta_prelayernorm.encoder.layer.{i}",
        {"mixer.norm": "attention.LayerNorm", "ffn.norm": "intermediate.LayerNorm"},
    ),
)
