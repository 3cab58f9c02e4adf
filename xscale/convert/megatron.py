"""Map xscale's decoder to Megatron-Core's GPTModel (Shoeybi et al. 2019; Narayanan et al. 2021): config and tensors."""

from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import (
    Data,
    ModelSizes,
    Requirements,
    require_features,
    uniform_block,
)
from xscale.convert.mapping import (
    GATE_UP,
    GATE_UP_EXPERTS,
    UNSTACKED,
    WeightMapping,
    interleaved_qkv,
    per_block,
    weight,
    with_biases,
)
from xscale.core.errors import ConfigError
from xscale.nn.ffn.ffn import gated_hidden

LIBRARY = "megatron-core"
BLOCK = "model.stack.block"
XSCALE_BLOCK = "stack.blocks.{i}"
LAYER = "decoder.layers.{i}"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "fast_gelu", "swish": "silu"}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}


@dataclass(frozen=True)
class GPTModelArguments:
    """The arguments that build a GPTModel, as plain data."""

    config: Data
    """Arguments of TransformerConfig, with activation_func as a name."""
    model: Data
    """Arguments of GPTModel."""


def gpt_model_arguments(config: Any, sizes: ModelSizes) -> GPTModelArguments:
    """Return the arguments of the GPTModel equal to `config`; ConfigError with every key that does not map."""
    require = Requirements(LIBRARY)
    shape = _shape(config, sizes, require)
    if require.problems:
        raise ConfigError(require.problems)
    return shape


def _shape(config: Any, sizes: ModelSizes, require: Requirements) -> GPTModelArguments:
    empty = GPTModelArguments({}, {})
    if not require.one_of("model", config.kind, "decoder"):
        return empty
    block = uniform_block(config.stack, require, "model.stack")
    require_features(config, (), require)
    require.one_of("model.position", config.position.kind, *POSITIONS)
    require.one_of(f"{BLOCK}.residual", block.residual.kind, "pre")
    require.one_of(f"{BLOCK}.norm", block.norm.kind, *NORMS)
    require.one_of(f"{BLOCK}.mixer", block.mixer.kind, "attention")
    require.one_of(f"{BLOCK}.ffn", block.ffn.kind, "dense", "gated", "moe")
    if require.problems:
        return empty
    if block.norm.kind == "layer":
        require.one_of(f"{BLOCK}.norm.bias", block.norm.bias, True)
    network = {
        "num_layers": config.stack.depth,
        "hidden_size": config.width,
        "normalization": NORMS[block.norm.kind],
        "layernorm_epsilon": block.norm.eps,
        "bias_activation_fusion": False,
    }
    network |= _attention(config, block, require)
    network |= (
        _mixture(config, block.ffn, require)
        if block.ffn.kind == "moe"
        else _ffn(config, block.ffn, require)
    )
    biases = bool(getattr(block.ffn, "bias", False))
    out = block.mixer.bias if block.mixer.output_bias is None else block.mixer.output_bias
    # One switch, add_bias_linear, applies to the ffn and to the output projection of the attention.
    require.one_of(f"{BLOCK}.mixer.output_bias", out, biases)
    if biases:
        require.one_of(f"{BLOCK}.mixer.bias", block.mixer.bias, True)
    network |= {"add_bias_linear": biases, "add_qkv_bias": block.mixer.bias}
    return GPTModelArguments(
        network, _around(config, sizes, network.get("kv_channels", 0), require)
    )


def _around(config: Any, sizes: ModelSizes, head_width: int, require: Requirements) -> Data:
    position = config.position
    model: Data = {
        "vocab_size": sizes.vocabulary,
        "max_sequence_length": getattr(position, "length", None) or sizes.length,
        "position_embedding_type": POSITIONS[position.kind],
        "share_embeddings_and_output_weights": config.tied,
    }
    if position.kind == "rope":
        if int(head_width * position.fraction) % 2:
            what = f"{position.fraction} of {head_width} channels is an odd number"
            require.reject(
                "model.position.fraction",
                what,
                "A fraction with an even number of channels would map.",
            )
        model |= {"rotary_percent": position.fraction, "rotary_base": position.base}
    return model


def _attention(config: Any, block: Any, require: Requirements) -> Data:
    mixer = block.mixer
    require.one_of(f"{BLOCK}.mixer.core", mixer.core.kind, "softmax")
    require.one_of(f"{BLOCK}.mixer.shared_qk", mixer.shared_qk or False, False)
    if mixer.head_width is None and config.width % mixer.heads:
        require.reject(f"{BLOCK}.mixer.heads", "they do not divide the width", "Give head_width.")
    if mixer.qk_norm is not None:
        # A GPTModel has one kind of norm, with one epsilon.
        require.one_of(f"{BLOCK}.mixer.qk_norm", mixer.qk_norm, None, block.norm)
    return {
        "num_attention_heads": mixer.heads,
        "num_query_groups": mixer.kv_heads or mixer.heads,
        "kv_channels": mixer.head_width or config.width // mixer.heads,
        "qk_layernorm": mixer.qk_norm is not None,
    }


def _ffn(config: Any, ffn: Any, require: Requirements, path: str = f"{BLOCK}.ffn") -> Data:
    if ffn.kind == "gated":
        require.one_of(f"{path}.gate", ffn.gate, *GATES)
        activation, hidden = GATES.get(ffn.gate), gated_hidden(ffn.hidden, config.width)
    else:
        require.one_of(f"{path}.activation", ffn.activation, *ACTIVATIONS)
        activation, hidden = ACTIVATIONS.get(ffn.activation), ffn.hidden or 4 * config.width
    return {
        "ffn_hidden_size": hidden,
        "gated_linear_unit": ffn.kind == "gated",
        "activation_func": activation,
    }


def _mixture(config: Any, ffn: Any, require: Requirements) -> Data:
    path, router = f"{BLOCK}.ffn", ffn.router
    require.one_of(f"{path}.router", router.kind, "topk")
    require.one_of(f"{path}.expert", ffn.expert.kind, "gated", "dense")
    require.one_of(f"{path}.shared", None if ffn.shared is None else ffn.shared.kind, None)
    require.one_of(f"{path}.capacity_factor", ffn.capacity_factor, None)
    if require.problems:
        return {}
    require.one_of(f"{path}.expert.bias", ffn.expert.bias, False)
    require.one_of(f"{path}.router.bias_update_rate", router.bias_update_rate, 0.0)
    require.one_of(f"{path}.router.balance_over", router.balance_over, "micro_batch", "sequence")
    # With top_k 1 GPTModel never normalises the gates, and with several sigmoid scores it always does.
    if router.top_k == 1 or router.score == "sigmoid":
        require.one_of(f"{path}.router.normalise", router.normalise, router.top_k > 1)
    data = _ffn(config, ffn.expert, require, f"{path}.expert")
    return data | {
        "num_moe_experts": ffn.experts,
        "moe_ffn_hidden_size": data["ffn_hidden_size"],
        "moe_router_topk": router.top_k,
        "moe_router_score_function": router.score,
        "moe_router_pre_softmax": router.score == "softmax" and not router.normalise,
        "moe_router_topk_scaling_factor": None if router.scale == 1 else router.scale,
        "moe_router_dtype": "fp32" if router.precision == "float32" else None,
        "moe_router_load_balancing_type": "none",
    }


def weights(config: Any) -> list[WeightMapping]:
    """Map every tensor, for a config that `gpt_model_arguments` accepts."""
    block = config.stack.block_config(0)
    mixer, ffn = block.mixer, block.ffn
    normed, output = (
        block.norm.kind == "layer",
        mixer.bias if mixer.output_bias is None else mixer.output_bias,
    )
    kv_heads = mixer.kv_heads or mixer.heads
    inputs = " ".join(f"{XSCALE_BLOCK}.mixer.part.{part}.weight" for part in "qkv")
    prefix = f"{LAYER}.self_attention"
    layer = [
        *with_biases(
            [weight(f"{XSCALE_BLOCK}.mixer.norm.weight", f"{LAYER}.input_layernorm.weight")], normed
        ),
        *with_biases(
            [weight(f"{XSCALE_BLOCK}.ffn.norm.weight", f"{LAYER}.pre_mlp_layernorm.weight")], normed
        ),
        *with_biases(
            [
                weight(
                    inputs,
                    f"{prefix}.linear_qkv.weight",
                    interleaved_qkv(kv_heads, mixer.heads // kv_heads),
                )
            ],
            mixer.bias,
        ),
        *with_biases(
            [weight(f"{XSCALE_BLOCK}.mixer.part.o.weight", f"{prefix}.linear_proj.weight")], output
        ),
    ]
    if mixer.qk_norm is not None:
        for part in "qk":
            norm = weight(
                f"{XSCALE_BLOCK}.mixer.part.{part}_norm.weight", f"{prefix}.{part}_layernorm.weight"
            )
            layer += with_biases([norm], normed)
    layer += _experts(ffn) if ffn.kind == "moe" else _maps(ffn)
    outer = [
        weight("embed.table.weight", "embedding.word_embeddings.weight"),
        *with_biases([weight("stack.norm.weight", "decoder.final_layernorm.weight")], normed),
    ]
    if config.position.kind == "learned":
        outer.append(weight("embed.position.weight", "embedding.position_embeddings.weight"))
    if not config.tied:
        outer.append(weight("head.weight", "output_layer.weight"))
    return [*outer, *per_block(config.stack.depth, layer)]


def _maps(ffn: Any) -> list[WeightMapping]:
    part, prefix = f"{XSCALE_BLOCK}.ffn.part", f"{LAYER}.mlp"
    if ffn.kind == "gated":
        first = weight(
            f"{part}.gate.weight {part}.up.weight", f"{prefix}.linear_fc1.weight", GATE_UP
        )
    else:
        first = weight(f"{part}.up.weight", f"{prefix}.linear_fc1.weight")
    return with_biases(
        [first, weight(f"{part}.down.weight", f"{prefix}.linear_fc2.weight")], ffn.bias
    )


def _experts(ffn: Any) -> list[WeightMapping]:
    part, prefix = f"{XSCALE_BLOCK}.ffn.part", f"{LAYER}.mlp"
    first, second = (
        " ".join(
            f"{prefix}.experts.local_experts.{expert}.{name}.weight"
            for expert in range(ffn.experts)
        )
        for name in ("linear_fc1", "linear_fc2")
    )
    ups = weight(f"{part}.experts.up", first, UNSTACKED)
    if ffn.expert.kind == "gated":
        ups = weight(f"{part}.experts.gate {part}.experts.up", first, GATE_UP_EXPERTS)
    router = weight(f"{part}.router.weight", f"{prefix}.router.weight")
    return [router, ups, weight(f"{part}.experts.down", second, UNSTACKED)]
