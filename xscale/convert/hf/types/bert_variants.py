"""Variants of BERT: BigBird (Zaheer et al. 2020) with full attention, ALBERT (Lan et al. 2020), DistilBERT (Sanh et al.
2019), ELECTRA's generator (Clark et al. 2020) and MPNet (Song et al. 2020)."""

from typing import Any

from xscale.convert.hf.architecture import Data, Requirements, SentenceHeadLayout
from xscale.convert.hf.tables.keys import Computed, Initial, SameKey, Writing
from xscale.convert.hf.tables.tensors import blocks
from xscale.convert.hf.types.bert import (
    BERT,
    CLS,
    LM_HEAD,
    OTHER_HEADS,
    ROBERTA,
    TYPES,
    encoder,
    length_after_padding,
    sentence_rows,
    tensors,
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
    | sentence_rows(SENTENCE_ORDER),
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
                lambda reading: length_after_padding(reading.data),
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
