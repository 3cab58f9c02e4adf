"""GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks with layer norm, biases everywhere, a tied head."""

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
from xscale.convert.mapping import (
    CONCATENATED,
    CONCATENATED_TRANSPOSED,
    TRANSPOSED,
    WeightMapping,
    per_block,
    weight,
    with_biases,
)

KEYS = {
    "n_embd": "width",
    "n_layer": "stack.depth",
    "n_head": "stack.block.mixer.heads",
    "layer_norm_epsilon": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "embd_pdrop": "dropout",
    "resid_pdrop": "stack.block.dropout",
    "attn_pdrop": "stack.block.mixer.dropout",
    "tie_word_embeddings": "tied",
}
"""Keys with the same value, in both directions."""


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    block = classic_block(config, "pre", require)
    if block is None:
        return {}
    ffn = block.ffn
    return keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "n_positions": config.position.length or sizes.length,
        "n_inner": ffn.hidden or 4 * config.width,
        "activation_function": ACTIVATIONS.get(ffn.activation),
    }


def from_hf(data: Data, require: Requirements) -> Data:
    require.one_of("scale_attn_weights", data["scale_attn_weights"], True)
    require.one_of(
        "scale_attn_by_inverse_layer_idx", data["scale_attn_by_inverse_layer_idx"], False
    )
    require.one_of("add_cross_attention", data.get("add_cross_attention", False), False)
    ffn = {
        "kind": "dense",
        "hidden": data["n_inner"] or 4 * data["n_embd"],
        "activation": activation_of(data["activation_function"], require, "activation_function"),
        "bias": True,
    }
    block = {
        "mixer": {"kind": "attention", "bias": True},
        "ffn": ffn,
        "norm": {"kind": "layer"},
        "residual": "pre",
    }
    section = {
        "kind": "decoder",
        "position": {"kind": "learned", "length": data["n_positions"]},
        "stack": {"block": block},
    }
    return keys_from_hf(KEYS, data, section)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    layer, block = "transformer.h.{i}", "stack.blocks.{i}"
    projections = [f"{block}.mixer.part.{part}" for part in "qkv"]
    blocks = [
        *with_biases([weight(f"{block}.mixer.norm.weight", f"{layer}.ln_1.weight")], True),
        *with_biases([weight(f"{block}.ffn.norm.weight", f"{layer}.ln_2.weight")], True),
        weight(
            " ".join(f"{part}.weight" for part in projections),
            f"{layer}.attn.c_attn.weight",
            CONCATENATED_TRANSPOSED,
        ),
        weight(
            " ".join(f"{part}.bias" for part in projections),
            f"{layer}.attn.c_attn.bias",
            CONCATENATED,
        ),
        weight(f"{block}.mixer.part.o.weight", f"{layer}.attn.c_proj.weight", TRANSPOSED),
        weight(f"{block}.mixer.part.o.bias", f"{layer}.attn.c_proj.bias"),
        weight(f"{block}.ffn.part.up.weight", f"{layer}.mlp.c_fc.weight", TRANSPOSED),
        weight(f"{block}.ffn.part.up.bias", f"{layer}.mlp.c_fc.bias"),
        weight(f"{block}.ffn.part.down.weight", f"{layer}.mlp.c_proj.weight", TRANSPOSED),
        weight(f"{block}.ffn.part.down.bias", f"{layer}.mlp.c_proj.bias"),
    ]
    outer = [
        weight("embed.table.weight", "transformer.wte.weight"),
        weight("embed.position.weight", "transformer.wpe.weight"),
        *with_biases([weight("stack.norm.weight", "transformer.ln_f.weight")], True),
    ]
    if not config.tied:
        outer.append(weight("head.weight", "lm_head.weight"))
    return [*outer, *per_block(config.stack.depth, blocks)]


GPT2 = Architecture(
    name="gpt2",
    kind="decoder",
    loader="GPT2LMHeadModel",
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    prefix="transformer.",
    ignored=(r".*\.attn\.(bias|masked_bias)",),
)
