"""DeBERTa v2 and v3 (He et al. 2021): masked language models whose scores read relative positions.

Without the enhanced mask decoder, which the library leaves out too, and without v2's convolution.
"""

from typing import Any

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
from xscale.convert.hf.types.bert import TYPES
from xscale.convert.mapping import DUPLICATED, WeightMapping, per_block, weight, with_biases

KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "num_attention_heads": "stack.block.mixer.heads",
    "attention_probs_dropout_prob": "stack.block.mixer.dropout",
    "hidden_dropout_prob": "stack.block.dropout",
    "layer_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys with the same value, in both directions."""
NAME = "deberta-v2"
BODY, HEAD = "deberta", "cls.predictions"
NORM = "layer_norm"
"""Value of `norm_rel_ebd` for a norm of the table of distances."""


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    block = classic_block(config, "post", require, position="deberta")
    require.one_of("model.embedding_norm", getattr(config.embedding_norm, "kind", None), "layer")
    if block is None or config.embedding_norm is None:
        return {}
    position, ffn = config.position, block.ffn
    require.one_of("model.embedding_norm", config.embedding_norm, block.norm)
    require.one_of("model.position.shared", position.shared, True)
    require.one_of("model.position.norm", position.norm, None, block.norm)
    require.one_of("model.head_bias", config.head_bias, True)
    require.one_of("model.global_tokens", config.global_tokens, 0)
    require.one_of("model.transform", config.transform, ffn.activation)
    return keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "intermediate_size": ffn.hidden or 4 * config.width,
        "hidden_act": ACTIVATIONS.get(ffn.activation),
        "max_position_embeddings": sizes.length,
        "max_relative_positions": position.distance,
        "position_buckets": position.buckets or -1,
        "norm_rel_ebd": "none" if position.norm is None else NORM,
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": config.token_types,
        "legacy": True,
    }


def from_hf(data: Data, require: Requirements) -> Data:
    terms = data.get("pos_att_type") or []
    require.one_of("relative_attention", data.get("relative_attention", False), True)
    require.one_of("share_att_key", data.get("share_att_key", False), True)
    require.one_of("position_biased_input", data.get("position_biased_input", True), False)
    require.one_of(
        "embedding_size", data.get("embedding_size", data["hidden_size"]), data["hidden_size"]
    )
    if sorted(terms) != ["c2p", "p2c"]:
        what = f"xscale has the terms c2p and p2c together, and this model has {' and '.join(terms) or 'none'}"
        require.reject("pos_att_type", what, "p2c|c2p would map.")
    if data.get("conv_kernel_size", 0) > 0:
        what = (
            "xscale has no convolution beside the first block, which v2's xlarge and xxlarge have"
        )
        require.reject(
            "conv_kernel_size", what, "A model without it, such as DeBERTa v3, would map."
        )
    if not data.get("legacy", True):
        what = "its head has a matrix of hidden_size and a bias under other names, lm_predictions"
        require.reject("legacy", what, "legacy=true would map.")
    act = activation_of(data["hidden_act"], require, "hidden_act")
    norm = {"kind": "layer", "eps": data["layer_norm_eps"]}
    buckets = data.get("position_buckets", -1)
    distance = data.get("max_relative_positions", -1)
    position = {
        "kind": "deberta",
        "buckets": buckets if buckets > 0 else None,
        "distance": distance if distance > 0 else data["max_position_embeddings"],
        "norm": norm if NORM in str(data.get("norm_rel_ebd", "none")).lower() else None,
        "shared": True,
    }
    ffn = {"kind": "dense", "hidden": data["intermediate_size"], "activation": act, "bias": True}
    block = {
        "mixer": {"kind": "attention", "bias": True},
        "ffn": ffn,
        "norm": norm,
        "residual": "post",
    }
    section = {
        "kind": "encoder",
        "position": position,
        "dropout": float(data["hidden_dropout_prob"]),
        "embedding_norm": norm,
        "token_types": data["type_vocab_size"],
        "transform": act,
        "head_bias": True,
        "stack": {"block": block},
    }
    return keys_from_hf(KEYS, data, section)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    block, layer = "stack.blocks.{i}", f"{BODY}.encoder.layer.{{i}}"
    maps = [
        weight(f"{block}.mixer.part.{part}.weight", f"{layer}.attention.self.{name}_proj.weight")
        for part, name in (("q", "query"), ("k", "key"), ("v", "value"))
    ]
    maps += [
        weight(f"{block}.mixer.part.o.weight", f"{layer}.attention.output.dense.weight"),
        weight(f"{block}.mixer.norm.weight", f"{layer}.attention.output.LayerNorm.weight"),
        weight(f"{block}.ffn.part.up.weight", f"{layer}.intermediate.dense.weight"),
        weight(f"{block}.ffn.part.down.weight", f"{layer}.output.dense.weight"),
        weight(f"{block}.ffn.norm.weight", f"{layer}.output.LayerNorm.weight"),
    ]
    embeddings = f"{BODY}.embeddings"
    outer = [weight("embed.norm.weight", f"{embeddings}.LayerNorm.weight")]
    outer += [
        weight(f"head.transform.{part}.weight", f"{HEAD}.transform.{name}.weight")
        for part, name in TRANSFORM
    ]
    if config.position.norm is not None:
        outer.append(weight("stack.position.norm.weight", f"{BODY}.encoder.LayerNorm.weight"))
    outer = with_biases(outer, True)
    outer.append(weight("embed.table.weight", f"{embeddings}.word_embeddings.weight"))
    outer.append(weight("stack.position.table", f"{BODY}.encoder.rel_embeddings.weight"))
    if config.token_types:
        outer.append(weight("embed.types", f"{embeddings}.token_type_embeddings.weight"))
    if config.tied:
        outer.append(weight("head.bias", f"{HEAD}.bias"))
    else:
        outer.append(weight("head.weight", f"{HEAD}.decoder.weight"))
        outer.append(weight("head.bias", f"{HEAD}.decoder.bias {HEAD}.bias", DUPLICATED))
    return [*outer, *per_block(config.stack.depth, with_biases(maps, True))]


TRANSFORM = (("dense", "dense"), ("norm", "LayerNorm"))
"""Parts of the head before its table: name in xscale, name in transformers."""

DEBERTA_V2 = Architecture(
    name=NAME,
    kind="encoder",
    loader="DebertaV2ForMaskedLM",
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    ignored=(
        r".*\.position_ids",
        # Of the released files: the decoder of replaced tokens, and the mask decoder's absolute positions.
        r"(mask_predictions|lm_predictions)\..*",
        r"deberta\.embeddings\.position_embeddings\.weight",
        r"cls\.predictions\.decoder\.(bias|weight)",
    ),
    notes=(
        TYPES,
        "dropout of the table of distances: transformers applies it in training, xscale has none",
    ),
)
