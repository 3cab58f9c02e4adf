"""XLNet (Yang et al. 2019): the content stream, a bidirectional encoder with the positions of Transformer-XL.

Not mapped are the query stream, which permutation language modelling reads beside it (its one weight is `mask_emb`),
and segments: the library leaves their term of the scores out where it gets no token types, and where all tokens have
one type the term is the same for all keys, so that the softmax does not see it.
"""

from typing import Any

from torch import Tensor

from xscale.convert.hf.architecture import (
    ACTIVATIONS,
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    activation_of,
    classic_block,
)
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.mapping import Tensors, Transform, WeightMapping, per_block, weight, with_biases

SEGMENTS = 2

KEYS = {
    "d_model": "width",
    "n_layer": "stack.depth",
    "n_head": "stack.block.mixer.heads",
    "dropout": "stack.block.dropout",
    "layer_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys with the same value, in both directions."""


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    block = classic_block(config, "post", require, position="transformer_xl", mixer_bias=False)
    if block is None:
        return {}
    mixer, ffn = block.mixer, block.ffn
    require.one_of("model.position.base", config.position.base, 10000.0)
    require.one_of("model.position.shared_biases", config.position.shared_biases, False)
    require.one_of("model.embedding_norm", getattr(config.embedding_norm, "kind", None), None)
    require.one_of("model.transform", config.transform, None)
    require.one_of("model.head_bias", config.head_bias, True)
    require.one_of("model.global_tokens", config.global_tokens, 0)
    require.one_of("model.token_types", config.token_types, 0)
    require.one_of("model.dropout", config.dropout, block.dropout)
    require.one_of("model.stack.block.mixer.dropout", mixer.dropout, block.dropout)
    return keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "d_inner": ffn.hidden or 4 * config.width,
        "ff_activation": ACTIVATIONS.get(ffn.activation),
        "attn_type": "bi",
    }


def from_hf(data: Data, require: Requirements) -> Data:
    if data["attn_type"] != "bi":
        what = "a causal XLNet has a bias of its logits, and xscale's decoder has none"
        require.reject("attn_type", what, "bi would map.")
    require.one_of("bi_data", data["bi_data"], False)
    require.one_of("same_length", data["same_length"], False)
    if data["clamp_len"] > 0:
        what = f"xscale tells all distances apart, and this model those up to {data['clamp_len']}"
        require.reject("clamp_len", what, "-1 would map.")
    act = activation_of(data["ff_activation"], require, "ff_activation")
    dropout = float(data["dropout"])
    block = {
        "mixer": {"kind": "attention", "dropout": dropout},
        "ffn": {"kind": "dense", "hidden": data["d_inner"], "activation": act, "bias": True},
        "norm": {"kind": "layer"},
        "residual": "post",
    }
    section = {
        "kind": "encoder",
        "position": {"kind": "transformer_xl"},
        "dropout": dropout,
        "head_bias": True,
        "stack": {"block": block},
    }
    return keys_from_hf(KEYS, data, section)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    heads, width = config.stack.block_config(0).mixer.heads, config.width
    attention, layer = "stack.blocks.{i}.mixer", "transformer.layer.{i}"
    into, out = by_head(heads, rows_are_heads=True), by_head(heads, rows_are_heads=False)
    projections = {"q": "q", "k": "k", "v": "v", "position": "r"}
    maps = [
        weight(f"{attention}.part.{part}.weight", f"{layer}.rel_attn.{name}", into)
        for part, name in projections.items()
    ]
    maps.append(weight(f"{attention}.part.o.weight", f"{layer}.rel_attn.o", out))
    biases = f"{layer}.rel_attn.r_w_bias {layer}.rel_attn.r_s_bias {layer}.rel_attn.seg_embed"
    maps.append(
        weight(f"{attention}.part.position.content_bias", biases, with_zeros((), (SEGMENTS,)))
    )
    maps.append(weight(f"{attention}.part.position.position_bias", f"{layer}.rel_attn.r_r_bias"))
    biased = [
        weight(f"{attention}.norm.weight", f"{layer}.rel_attn.layer_norm.weight"),
        weight("stack.blocks.{i}.ffn.part.up.weight", f"{layer}.ff.layer_1.weight"),
        weight("stack.blocks.{i}.ffn.part.down.weight", f"{layer}.ff.layer_2.weight"),
        weight("stack.blocks.{i}.ffn.norm.weight", f"{layer}.ff.layer_norm.weight"),
    ]
    tables = "transformer.word_embedding.weight transformer.mask_emb"
    query_stream = Transform(
        lambda tensors: [tensors[0], tensors[0].new_zeros(1, 1, width)], lambda tensors: tensors[:1]
    )
    outer = [
        weight("embed.table.weight", tables, query_stream),
        weight("head.bias", "lm_loss.bias"),
    ]
    if not config.tied:
        outer.append(weight("head.weight", "lm_loss.weight"))
    return [*outer, *per_block(config.stack.depth, [*maps, *with_biases(biased, True)])]


def by_head(heads: int, *, rows_are_heads: bool) -> Transform:
    """Transform a matrix [H * K, D], or [D, H * K] if not `rows_are_heads`, to [D, H, K]."""

    def forward(tensors: Tensors) -> Tensors:
        columns = tensors[0].t() if rows_are_heads else tensors[0]
        return [columns.reshape(len(columns), heads, -1)]

    def inverse(tensors: Tensors) -> Tensors:
        columns = tensors[0].flatten(1)
        return [columns.t() if rows_are_heads else columns]

    return Transform(forward, inverse)


def with_zeros(*shapes: tuple[int, ...]) -> Transform:
    """Transform a weight [H, K] to itself and one weight of zeros [*shape, H, K] for each shape, which no import
    reads."""

    def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return like.new_zeros(*shape, *like.shape)

    return Transform(
        lambda tensors: [tensors[0], *(zeros(tensors[0], shape) for shape in shapes)],
        lambda tensors: tensors[:1],
    )


XLNET = Architecture(
    name="xlnet",
    kind="encoder",
    loader="XLNetLMHeadModel",
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    ignored=(r"lm_loss\.weight",),
    notes=(
        "query stream: xscale trains the content stream alone; the weight of masked queries, mask_emb, is zero",
        "segments: every token has the first; their weights are zero",
        "dropout: transformers also applies it to the sinusoids, the hidden units of the ffn and the output",
    ),
)
