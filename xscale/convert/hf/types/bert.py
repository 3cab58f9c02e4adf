"""BERT (Devlin et al. 2019) and its kind: RoBERTa (Liu et al. 2019), XLM-R, CamemBERT, BigBird (Zaheer et al. 2020)
with full attention, ALBERT (Lan et al. 2020), DistilBERT (Sanh et al. 2019), ELECTRA's generator (Clark et al. 2020),
MPNet (Song et al. 2020)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import Data, Requirements, SentenceHeadLayout
from xscale.convert.hf.tables.keys import (
    Computed,
    Initial,
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


def _length_before(data: Data) -> int:
    return int(data["max_position_embeddings"] - (data["pad_token_id"] or 0) - 1)


AFTER_PADDING = Computed(
    lambda reading: _length_before(reading.data),
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


def _sentence_rows(layout: SentenceHeadLayout) -> Rows:
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
    tensors=tensors("bert", *CLS) | _sentence_rows(NEXT_SENTENCE),
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
FULL = "original_full"


def _full_attention(data: Data, require: Requirements) -> None:
    """Refuse BigBird's sparse attention.

    In training the library draws random blocks in each call, and in evaluation it replaces each random block by the
    first one, which is then counted several times.
    """
    # Up to this many tokens the library itself uses full attention.
    full = (5 + 2 * data["num_random_blocks"]) * data["block_size"]
    if data["attention_type"] != FULL and data["max_position_embeddings"] > full:
        what = (
            f"{data['attention_type']} has no counterpart beyond {full} tokens: in evaluation the first block "
            f"replaces each of the {data['num_random_blocks']} random blocks and is counted several times"
        )
        fix = f"Set it to {FULL}: the weights fit both, and the model then attends to every token."
        require.reject("attention_type", what, fix)


BIG_BIRD = BERT.variant(
    "big_bird",
    "BigBirdForMaskedLM",
    fixed={"use_bias": (True,), "rescale_embeddings": (False,)},
    hf_checks=(_full_attention,),
    writes=lambda config, sizes: {"attention_type": FULL},
    tensors=tensors("bert", *CLS),
    notes=(
        TYPES,
        "embedding dropout: transformers applies it before the embedding norm, xscale after it",
        "pooler: xscale has none; transformers initialises one, which masked language modelling does not use",
    ),
    sentence_head=None,
)
SENTENCE_ORDER = SentenceHeadLayout(
    "AlbertForPreTraining", "albert.pooler", "sop_classifier.classifier", "sop_logits"
)


def _factorised(config: Any, require: Requirements) -> None:
    if config.embedding_width is None:
        what = f"{require.architecture} has a linear map from the embeddings to the blocks"
        require.reject("model.embedding_width", what, "An embedding_width would map.")


ALBERT = BERT.variant(
    "albert",
    "AlbertForMaskedLM",
    model={"embedding_width": SameKey("embedding_size")},
    stack={"share": "all"},
    fixed={"num_hidden_groups": (1,), "inner_group_num": (1,)},
    checks=(_factorised,),
    tensors=tensors(
        "albert",
        "predictions.dense",
        "predictions.LayerNorm",
        "predictions.bias",
    )
    | {"embed.project": "albert.encoder.embedding_hidden_mapping_in"}
    | blocks(
        "stack.shared",
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        {
            "mixer.part.q": "attention.query",
            "mixer.part.k": "attention.key",
            "mixer.part.v": "attention.value",
            "mixer.part.o": "attention.dense",
            "mixer.norm": "attention.LayerNorm",
            "ffn.part.up": "ffn",
            "ffn.part.down": "ffn_output",
            "ffn.norm": "full_layer_layer_norm",
        },
    )
    | _sentence_rows(SENTENCE_ORDER),
    ignored=(
        r".*\.position_ids",
        r".*\.pooler\..*",
        r"sop_classifier\..*",
        r"predictions\.decoder\.(bias|weight)",
    ),
    ignored_keys=OTHER_HEADS | {"classifier_dropout_prob"},
    sentence_head=SENTENCE_ORDER,
)
DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Keys of BERT -> those of DistilBERT."""
DISTILBERT = BERT.variant(
    "distilbert",
    "DistilBertForMaskedLM",
    model=encoder(DISTILBERT_KEYS, norm={"eps": Initial(1e-12)}, token_types=0),
    # They are a learned table here and frozen there.
    fixed={"sinusoidal_pos_embds": (False,), "is_decoder": None, "add_cross_attention": None},
    tensors=tensors(
        "distilbert",
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector.bias",
        types=0,
    )
    | {"head.weight": "vocab_projector.weight", "head.bias": "vocab_projector.bias"}
    | blocks(
        "stack.blocks.{i}",
        "distilbert.transformer.layer.{i}",
        {
            "mixer.part.q": "attention.q_lin",
            "mixer.part.k": "attention.k_lin",
            "mixer.part.v": "attention.v_lin",
            "mixer.part.o": "attention.out_lin",
            "mixer.norm": "sa_layer_norm",
            "ffn.part.up": "ffn.lin1",
            "ffn.part.down": "ffn.lin2",
            "ffn.norm": "output_layer_norm",
        },
    ),
    ignored=(r".*\.position_ids", r"vocab_projector\.weight"),
    ignored_keys=frozenset({"qa_dropout", "seq_classif_dropout"}),
    notes=(),
    sentence_head=None,
)
ELECTRA = BERT.variant(
    "electra",
    "ElectraForMaskedLM",
    model={
        "embedding_width": Computed(
            lambda reading: (
                None
                if reading.data["embedding_size"] == reading.data["hidden_size"]
                else reading.data["embedding_size"]
            ),
            lambda width, writing: {"embedding_size": width or writing.config.width},
            ("embedding_size",),
        ),
        "transform": "gelu",
    },
    tensors=tensors(
        "electra",
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head.bias",
        decoder="generator_lm_head",
    )
    | {"embed.project": "electra.embeddings_project", "head.bias": "generator_lm_head.bias"},
    ignored=(r".*\.position_ids", r"discriminator_predictions\..*", r"generator_lm_head\.weight"),
    ignored_keys=OTHER_HEADS
    | {f"summary_{key}" for key in ("type", "use_proj", "activation", "last_dropout")},
    sentence_head=None,
)


def _padding_of_mpnet(length: int, writing: Writing) -> Data:
    # The library counts positions from the first token that is not 1, whatever the padding id is.
    writing.require.one_of("data.tokenizer: padding id", writing.sizes.pad, 1)
    return {"max_position_embeddings": length + 2}


MPNET = ROBERTA.variant(
    "mpnet",
    "MPNetForMaskedLM",
    model={
        "position": {
            "length": Computed(
                lambda reading: _length_before(reading.data),
                _padding_of_mpnet,
                ("max_position_embeddings",),
            )
        },
        "token_types": 0,
    },
    block={
        "mixer": {
            "position": {
                "kind": "relative",
                "buckets": 32,
                "distance": Initial(128),
                "shared": True,
            }
        }
    },
    fixed={
        "is_decoder": None,
        "add_cross_attention": None,
        "pad_token_id": (1,),
        "relative_attention_num_buckets": (32,),
    },
    tensors=tensors("mpnet", *LM_HEAD, types=0, offset=True)
    | {"stack.position": "mpnet.encoder.relative_attention_bias"}
    | blocks(
        "stack.blocks.{i}",
        "mpnet.encoder.layer.{i}",
        {
            **{f"mixer.part.{part}": f"attention.attn.{part}" for part in "qkvo"},
            "mixer.norm": "attention.LayerNorm",
        },
    ),
    notes=(),
)
