"""Encoders whose scores read relative positions: DeBERTa v2 and v3 (He et al. 2021) and XLNet (Yang et al. 2019).

DeBERTa is without the enhanced mask decoder, which the library leaves out too, and without v2's convolution. XLNet is
its content stream, with the positions of Transformer-XL. Not mapped are the query stream, which permutation language
modelling reads beside it (its one weight is `mask_emb`), and segments: the library leaves their term of the scores out
where it gets no token types, and where all tokens have one type the softmax does not see it.
"""

from typing import Any

from torch import Tensor

from xscale.convert.hf.architecture import Data, Requirements
from xscale.convert.hf.tables.keys import ByKey, Computed, SameKey
from xscale.convert.hf.tables.tensors import Moved, RowContext, blocks
from xscale.convert.hf.types.bert import BERT, CLS, TYPES, encoder, tensors
from xscale.convert.mapping import Tensors, Transform

NORM = {"kind": "layer", "eps": SameKey("layer_norm_eps"), "bias": True}
SEGMENTS = 2


def _terms(data: Data, require: Requirements) -> None:
    """Refuse a DeBERTa with other terms, with a convolution, or with the head of another version."""
    terms = data.get("pos_att_type") or []
    if sorted(terms) != ["c2p", "p2c"]:
        what = f"xscale has the terms c2p and p2c together, and this model has {' and '.join(terms) or 'none'}"
        require.reject("pos_att_type", what, "p2c|c2p would map.")
    if data.get("conv_kernel_size", 0) > 0:
        what = (
            "xscale has no convolution beside the first block, which v2's xlarge and xxlarge have"
        )
        fix = "A model without it, such as DeBERTa v3, would map."
        require.reject("conv_kernel_size", what, fix)
    if not data.get("legacy", True):
        what = "its head has a matrix of hidden_size and a bias under other names, lm_predictions"
        require.reject("legacy", what, "legacy=true would map.")
    width = data["hidden_size"]
    require.one_of("embedding_size", data.get("embedding_size", width), width)


def _buckets(data: Data) -> int | None:
    buckets = data.get("position_buckets") or 0
    return buckets if buckets > 0 else None


def _distance(data: Data) -> int:
    distance = data.get("max_relative_positions") or -1
    return int(distance if distance > 0 else data["max_position_embeddings"])


DEBERTA_V2 = BERT.variant(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    model={
        "position": {
            "kind": "deberta",
            "shared": True,
            "buckets": Computed(
                lambda reading: _buckets(reading.data),
                lambda buckets, writing: {"position_buckets": buckets or -1},
                ("position_buckets",),
            ),
            "distance": Computed(
                lambda reading: _distance(reading.data),
                lambda distance, writing: {"max_relative_positions": distance},
                ("max_relative_positions",),
            ),
            "norm": ByKey("norm_rel_ebd", {"none": None, "layer_norm": NORM}, "none"),
        },
        "token_types": SameKey("type_vocab_size"),
    },
    fixed={
        "relative_attention": (True,),
        "share_att_key": (True,),
        "position_biased_input": (False,),
        "is_decoder": None,
        "add_cross_attention": None,
        "position_embedding_type": None,
    },
    hf_checks=(_terms,),
    writes=lambda config, sizes: {"pos_att_type": ["p2c", "c2p"], "legacy": True},
    tensors=tensors("deberta", *CLS, types=0)
    | {
        "stack.position.norm": "deberta.encoder.LayerNorm",
        "stack.position.table": "deberta.encoder.rel_embeddings.weight",
    }
    | blocks(
        "stack.blocks.{i}",
        "deberta.encoder.layer.{i}",
        {
            "mixer.part.q": "attention.self.query_proj",
            "mixer.part.k": "attention.self.key_proj",
            "mixer.part.v": "attention.self.value_proj",
        },
    ),
    ignored=(
        r".*\.position_ids",
        # Of the released files: the decoder of replaced tokens, and the mask decoder's absolute positions.
        r"(mask_predictions|lm_predictions)\..*",
        r"deberta\.embeddings\.position_embeddings\.weight",
        r"cls\.predictions\.decoder\.(bias|weight)",
    ),
    ignored_keys=frozenset({"pooler_dropout", "pooler_hidden_act", "pooler_hidden_size"})
    | {"conv_act", "padding_idx", "z_steps", "attention_head_size"},
    notes=(
        TYPES,
        "dropout of the table of distances: transformers applies it in training, xscale has none",
    ),
    sentence_head=None,
)


def _content_stream(data: Data, require: Requirements) -> None:
    """Refuse a causal XLNet, or one that does not tell all distances apart."""
    if data["attn_type"] != "bi":
        what = "a causal XLNet has a bias of its logits, and xscale's decoder has none"
        require.reject("attn_type", what, "bi would map.")
    if data["clamp_len"] > 0:
        what = f"xscale tells all distances apart, and this model those up to {data['clamp_len']}"
        require.reject("clamp_len", what, "-1 would map.")


def by_head(heads: int, *, rows_are_heads: bool) -> Transform:
    """Transform a matrix [H * K, D], or [D, H * K] if not `rows_are_heads`, to [D, H, K]."""

    def forward(matrices: Tensors) -> Tensors:
        columns = matrices[0].t() if rows_are_heads else matrices[0]
        return [columns.reshape(len(columns), heads, -1)]

    def inverse(matrices: Tensors) -> Tensors:
        columns = matrices[0].flatten(1)
        return [columns.t() if rows_are_heads else columns]

    return Transform(forward, inverse)


def with_zeros(*shapes: tuple[int, ...]) -> Transform:
    """Transform a weight [H, K] to itself and one weight of zeros [*shape, H, K] for each shape, which no import
    reads."""

    def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return like.new_zeros(*shape, *like.shape)

    return Transform(
        lambda matrices: [matrices[0], *(zeros(matrices[0], shape) for shape in shapes)],
        lambda matrices: matrices[:1],
    )


def _with_query_stream(row: RowContext) -> Transform:
    return Transform(
        lambda matrices: [matrices[0], matrices[0].new_zeros(1, 1, row.config.width)],
        lambda matrices: matrices[:1],
    )


def _into_heads(row: RowContext) -> Transform:
    return by_head(row.block.mixer.heads, rows_are_heads=True)


def _out_of_heads(row: RowContext) -> Transform:
    return by_head(row.block.mixer.heads, rows_are_heads=False)


_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "hidden_act": "ff_activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropout",
}
"""Keys of BERT -> those of XLNet."""
_ATTENTION: dict[str, Any] = {
    f"mixer.part.{part}.weight": Moved(f"rel_attn.{name}", _into_heads)
    for part, name in {"q": "q", "k": "k", "v": "v", "position": "r"}.items()
}
XLNET = BERT.variant(
    "xlnet",
    "XLNetLMHeadModel",
    model=encoder(
        _KEYS,
        position={"kind": "transformer_xl", "shared_biases": False},
        embedding_norm=None,
        token_types=0,
        transform=None,
    ),
    block={"mixer": {"bias": False}},
    fixed={
        "attn_type": ("bi",),
        "bi_data": (False,),
        "same_length": (False,),
        "is_decoder": None,
        "add_cross_attention": None,
        "position_embedding_type": None,
    },
    length_key="",
    hf_checks=(_content_stream,),
    tensors={
        "embed.table.weight": Moved(
            "transformer.word_embedding.weight transformer.mask_emb", _with_query_stream
        ),
        "head.bias": "lm_loss.bias",
        "head.weight": "lm_loss.weight",
        **blocks(
            "stack.blocks.{i}",
            "transformer.layer.{i}",
            {
                **_ATTENTION,
                "mixer.part.o.weight": Moved("rel_attn.o", _out_of_heads),
                "mixer.part.position.content_bias": Moved(
                    "rel_attn.r_w_bias rel_attn.r_s_bias rel_attn.seg_embed",
                    with_zeros((), (SEGMENTS,)),
                ),
                "mixer.part.position.position_bias": "rel_attn.r_r_bias",
                "mixer.norm": "rel_attn.layer_norm",
                "ffn.part.up": "ff.layer_1",
                "ffn.part.down": "ff.layer_2",
                "ffn.norm": "ff.layer_norm",
            },
        ),
    },
    ignored=(r"lm_loss\.weight",),
    ignored_keys=frozenset({"d_head", "mem_len", "reuse_len", "use_mems_eval", "use_mems_train"})
    | {f"summary_{key}" for key in ("type", "use_proj", "activation", "last_dropout")}
    | {"start_n_top", "end_n_top", "untie_r"},
    notes=(
        "query stream: xscale trains the content stream alone; the weight of masked queries, mask_emb, is zero",
        "segments: every token has the first; their weights are zero",
        "dropout: transformers also applies it to the sinusoids, the hidden units of the ffn and the output",
    ),
    sentence_head=None,
)
