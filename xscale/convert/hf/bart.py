"""BART (Lewis et al. 2020): a post-norm encoder-decoder with learned positions and a norm of the embeddings."""

from collections.abc import Callable
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
from xscale.convert.hf.keys import Keys, keys_from_hf, keys_to_hf
from xscale.convert.mapping import WeightMapping, per_block, rows_before, weight, with_biases
from xscale.core.errors import ConfigError

STACKS = ("encoder", "decoder")
UNUSED_POSITIONS = 2
"""Rows of each table of positions before position 0."""
KEYS: Keys = {
    "d_model": "width",
    "dropout": ("encoder.block.dropout", "decoder.block.dropout", "dropout"),
    "attention_dropout": ("encoder.block.mixer.dropout", "decoder.block.mixer.dropout"),
    "encoder_layers": "encoder.depth",
    "decoder_layers": "decoder.depth",
    "encoder_attention_heads": "encoder.block.mixer.heads",
    "decoder_attention_heads": "decoder.block.mixer.heads",
    "init_std": "init_std",
    "scale_embedding": "scale_embeddings",
}
"""Keys with the same value, in both directions."""
EPS = 1e-5
"""That of every norm; config.json has no key for it."""
LOGITS_BIAS = "final_logits_bias"


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    blocks = {}
    for stack in STACKS:
        path = f"model.{stack}.block"
        block = blocks[stack] = classic_block(config, "post", require, stack)
        if block is None:
            return {}
        require.one_of(f"{path}.cross", block.cross, None, block.mixer)
        require.one_of(f"{path}.norm.eps", block.norm.eps, EPS)
    encoder, decoder = blocks["encoder"], blocks["decoder"]
    require.one_of("model.tied", config.tied, True)
    require.one_of("model.scale_head", config.scale_head, False)
    require.one_of("model.embedding_norm", getattr(config.embedding_norm, "kind", None), "layer")
    if config.embedding_norm is not None:
        require.one_of("model.embedding_norm", config.embedding_norm, encoder.norm)
    for key, of_decoder, of_encoder in (
        ("dropout", decoder.dropout, encoder.dropout),
        ("mixer.dropout", decoder.mixer.dropout, encoder.mixer.dropout),
        ("ffn.activation", decoder.ffn.activation, encoder.ffn.activation),
    ):
        require.one_of(f"model.decoder.block.{key}", of_decoder, of_encoder)
    data: Data = keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": config.position.length or sizes.length,
        "activation_function": ACTIVATIONS.get(encoder.ffn.activation),
        "activation_dropout": 0.0,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "decoder_start_token_id": sizes.eos,
        "forced_eos_token_id": None,
    }
    for stack, block in blocks.items():
        data[f"{stack}_ffn_dim"] = block.ffn.hidden or 4 * config.width
    return data


def from_hf(data: Data, require: Requirements) -> Data:
    require.one_of("tie_word_embeddings", data["tie_word_embeddings"], True)
    activation = activation_of(data["activation_function"], require, "activation_function")
    norm = {"kind": "layer", "eps": EPS}
    section: Data = {
        "kind": "encoder_decoder",
        "position": {"kind": "learned", "length": data["max_position_embeddings"]},
        "tied": True,
        "embedding_norm": norm,
    }
    for stack in STACKS:
        mixer = {"kind": "attention", "bias": True}
        ffn = {
            "kind": "dense",
            "hidden": data[f"{stack}_ffn_dim"],
            "activation": activation,
            "bias": True,
        }
        block = {"mixer": mixer, "ffn": ffn, "norm": norm, "residual": "post"}
        section[stack] = {"block": block}
    return keys_from_hf(KEYS, data, section)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    mappings = [weight("source.table.weight", "model.shared.weight")]
    for stack, embed in zip(STACKS, ("source", "target"), strict=True):
        body = f"model.{stack}"
        positions = f"{body}.embed_positions.weight"
        mappings.append(
            weight(f"{embed}.position.weight", positions, rows_before(UNUSED_POSITIONS))
        )
        mappings += with_biases(
            [weight(f"{embed}.norm.weight", f"{body}.layernorm_embedding.weight")], True
        )
        block, layer = f"{stack}.blocks.{{i}}", f"{body}.layers.{{i}}"
        sublayers = [("mixer", "self_attn"), *[("cross", "encoder_attn")] * (stack == "decoder")]
        for sublayer, attention in sublayers:
            projections = [("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")]
            of_block = [
                weight(
                    f"{block}.{sublayer}.part.{part}.weight", f"{layer}.{attention}.{name}.weight"
                )
                for part, name in projections
            ]
            of_block.append(
                weight(f"{block}.{sublayer}.norm.weight", f"{layer}.{attention}_layer_norm.weight")
            )
            mappings += per_block(getattr(config, stack).depth, with_biases(of_block, True))
        feed = [
            weight(f"{block}.ffn.part.up.weight", f"{layer}.fc1.weight"),
            weight(f"{block}.ffn.part.down.weight", f"{layer}.fc2.weight"),
            weight(f"{block}.ffn.norm.weight", f"{layer}.final_layer_norm.weight"),
        ]
        mappings += per_block(getattr(config, stack).depth, with_biases(feed, True))
    return mappings


def _without_logits_bias(section: Data, tensor: Callable[[str], Tensor | None]) -> Data:
    """Refuse a bias of the logits that is not zero, as that of no published BART is."""
    bias = tensor(LOGITS_BIAS)
    if bias is not None and bias.any():
        what = "the bias of the logits is not zero and has no counterpart in xscale"
        raise ConfigError(LOGITS_BIAS, what, "A model without it would map.")
    return section


BART = Architecture(
    name="bart",
    kind="encoder_decoder",
    loader="BartForConditionalGeneration",
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    prefix="model.",
    ignored=(LOGITS_BIAS, r"(model\.)?(encoder|decoder)\.embed_tokens\.weight"),
    with_tensors=_without_logits_bias,
    features=frozenset({"scale_embeddings"}),
    objective="denoising",
    notes=(
        "dropout: transformers can also drop the ffn's hidden units (activation_dropout) and whole layers (layerdrop), "
        "and xscale does not",
        "decoder_start_token_id: the end of a document, as the objective denoising has it and seq2seq with begin=eos",
    ),
)
