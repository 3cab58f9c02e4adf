"""GPT-NeoX (Black et al. 2022) and Pythia: layer norms, biases, partial rotation, mixer and ffn side by side."""

from typing import Any

from xscale.convert.hf.architecture import (
    ACTIVATIONS,
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    activation_of,
    uniform_block,
)
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.hf.layers import dynamic_length, rope_from_hf, rope_to_hf
from xscale.convert.mapping import WeightMapping, interleaved_qkv, per_block, weight, with_biases

BLOCK = "model.stack.block"
KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "num_attention_heads": "stack.block.mixer.heads",
    "attention_bias": "stack.block.mixer.bias",
    "attention_dropout": "stack.block.mixer.dropout",
    "hidden_dropout": "stack.block.dropout",
    "layer_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys with the same value, in both directions."""


def to_hf(config: Any, sizes: ModelSizes, require: Requirements) -> Data:
    block = uniform_block(config.stack, require, "model.stack")
    require.one_of("model.position", config.position.kind, "rope")
    require.one_of(f"{BLOCK}.residual", block.residual.kind, "pre", "parallel")
    require.one_of(f"{BLOCK}.norm", block.norm.kind, "layer")
    require.one_of(f"{BLOCK}.mixer", block.mixer.kind, "attention")
    require.one_of(f"{BLOCK}.ffn", block.ffn.kind, "dense")
    if require.problems:
        return {}
    mixer = block.mixer
    ffn = block.ffn
    at = f"{BLOCK}.mixer"
    require.one_of(f"{BLOCK}.norm.bias", block.norm.bias, True)
    require.one_of(f"{at}.core", mixer.core.kind, "softmax")
    require.one_of(f"{at}.kv_heads", mixer.kv_heads, None, mixer.heads)
    require.one_of(f"{at}.head_width", mixer.head_width, None, config.width // mixer.heads)
    require.one_of(f"{at}.shared_qk", mixer.shared_qk or False, False)
    require.one_of(f"{at}.qk_norm", None if mixer.qk_norm is None else mixer.qk_norm.kind, None)
    require.one_of(f"{at}.output_bias", mixer.output_bias, None, mixer.bias)
    require.one_of(f"{BLOCK}.ffn.bias", ffn.bias, True)
    require.one_of(f"{BLOCK}.ffn.activation", ffn.activation, *ACTIVATIONS)
    require.one_of("model.dropout", config.dropout, block.dropout)
    if int(config.width // mixer.heads * config.position.fraction) % 2:
        what = (
            f"{config.position.fraction} of {config.width // mixer.heads} channels is an odd number"
        )
        require.reject(
            "model.position.fraction", what, "A fraction with an even number of channels would map."
        )
    require.one_of(
        f"{BLOCK}.residual.placement", getattr(block.residual, "placement", "pre"), "pre"
    )
    return keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "intermediate_size": ffn.hidden or 4 * config.width,
        "hidden_act": ACTIVATIONS.get(ffn.activation),
        "max_position_embeddings": sizes.length,
        "use_parallel_residual": block.residual.kind == "parallel",
        "rope_parameters": rope_to_hf(config.position)
        | {"partial_rotary_factor": config.position.fraction},
        **dynamic_length(config.position),
    }


def from_hf(data: Data, require: Requirements) -> Data:
    ffn = {
        "kind": "dense",
        "hidden": data["intermediate_size"],
        "activation": activation_of(data["hidden_act"], require, "hidden_act"),
        "bias": True,
    }
    block = {
        "mixer": {"kind": "attention"},
        "ffn": ffn,
        "norm": {"kind": "layer"},
        "residual": "parallel" if data["use_parallel_residual"] else "pre",
    }
    section = {
        "kind": "decoder",
        "position": rope_from_hf(data["rope_parameters"], data, require, partial=True),
        "dropout": float(data["hidden_dropout"]),
        "stack": {"block": block},
    }
    return keys_from_hf(KEYS, data, section)


def weights(config: Any, sizes: ModelSizes) -> list[WeightMapping]:
    layer, block = "gpt_neox.layers.{i}", "stack.blocks.{i}"
    mixer = config.stack.block_config(0).mixer
    inputs = " ".join(f"{block}.mixer.part.{part}.weight" for part in "qkv")
    attention = [
        weight(
            inputs, f"{layer}.attention.query_key_value.weight", interleaved_qkv(mixer.heads, 1)
        ),
        weight(f"{block}.mixer.part.o.weight", f"{layer}.attention.dense.weight"),
    ]
    norms_and_ffn = [
        weight(f"{block}.mixer.norm.weight", f"{layer}.input_layernorm.weight"),
        weight(f"{block}.ffn.norm.weight", f"{layer}.post_attention_layernorm.weight"),
        weight(f"{block}.ffn.part.up.weight", f"{layer}.mlp.dense_h_to_4h.weight"),
        weight(f"{block}.ffn.part.down.weight", f"{layer}.mlp.dense_4h_to_h.weight"),
    ]
    blocks = [*with_biases(attention, mixer.bias), *with_biases(norms_and_ffn, True)]
    outer = [
        weight("embed.table.weight", "gpt_neox.embed_in.weight"),
        *with_biases([weight("stack.norm.weight", "gpt_neox.final_layer_norm.weight")], True),
    ]
    if not config.tied:
        outer.append(weight("head.weight", "embed_out.weight"))
    return [*outer, *per_block(config.stack.depth, blocks)]


GPT_NEOX = Architecture(
    name="gpt_neox",
    kind="decoder",
    loader="GPTNeoXForCausalLM",
    to_hf=to_hf,
    from_hf=from_hf,
    weights=weights,
    prefix="gpt_neox.",
    ignored=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
    features=frozenset({"position.scaling"}),
)
