"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, experts in groups, shared experts.

V2 has softmax gates and ranks a group by its best expert; V3 has sigmoid gates, ranks a group by its two best experts,
and adds a bias to the gates for the selection.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from xscale.convert.hf.architecture import Architecture, Data, ModelSizes, Requirements
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.hf.layers import layer_blocks, layer_rules, rope_from_hf, rope_to_hf
from xscale.convert.mapping import (
    UNSTACKED,
    Tensors,
    Transform,
    WeightMapping,
    per_block,
    weight,
    zeros,
)
from xscale.nn.ffn.ffn import gated_hidden

BLOCK = "model.stack.block"
MIXER = "stack.blocks.{i}.mixer"
FFN = "stack.blocks.{i}.ffn"
LAYER = "model.layers.{i}"
EPS = 1e-6
"""Epsilon of the latents' norms in the library, whatever the other norms have."""
BIAS_UPDATE_RATE = 0.001
"""Rate of an imported selection bias, as in DeepSeek-V3: config.json does not have it."""
MIXER_KEYS = {
    "num_attention_heads": "heads",
    "kv_lora_rank": "kv_latent_width",
    "q_lora_rank": "query_latent_width",
    "qk_rope_head_dim": "rope_width",
    "attention_dropout": "dropout",
}
"""Keys of a mixer with the same value, in both directions."""
ROUTER_KEYS = {
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "scale",
    "n_group": "expert_groups",
    "topk_group": "topk_groups",
}
"""Those of a router."""
KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "rms_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys of a model with the same value, in both directions."""
Version = Literal[2, 3]


def to_hf(config: Any, sizes: ModelSizes, require: Requirements, version: Version) -> Data:
    blocks = layer_blocks(config.stack, require, "model.stack", ("ffn",))
    block = blocks[0]
    require.one_of("model.position", config.position.kind, "rope")
    require.one_of(f"{BLOCK}.residual", block.residual.kind, "pre")
    require.one_of(f"{BLOCK}.norm", block.norm.kind, "rms")
    require.one_of(f"{BLOCK}.mixer", block.mixer.kind, "mla")
    require.one_of(f"{BLOCK}.ffn", blocks[-1].ffn.kind, "moe")
    for layer_block in blocks:
        require.one_of(f"{BLOCK}.ffn", layer_block.ffn.kind, "gated", "moe")
    if require.problems:
        return {}
    require.one_of("model.position.fraction", config.position.fraction, 1.0)
    data: Data = keys_to_hf(KEYS, config) | {
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.length,
        "hidden_act": "silu",
    }
    if version == 2 and config.width % block.mixer.heads:
        fits = ", ".join(
            str(heads) for heads in range(1, config.width + 1) if config.width % heads == 0
        )
        what = f"{require.architecture} needs heads that divide the width, and {block.mixer.heads} do not"
        require.reject(f"{BLOCK}.mixer.heads", what, f"One of {fits} would map.")
    data |= _attention(config, block.mixer, require) | _ffns(
        config, [layer_block.ffn for layer_block in blocks], require, version
    )
    return data | ({"rope_interleave": True} if version == 3 else {"mlp_bias": False})


def _attention(config: Any, mixer: Any, require: Requirements) -> Data:
    at = f"{BLOCK}.mixer"
    require.one_of(f"{at}.core", mixer.core.kind, "softmax")
    if require.one_of(f"{at}.norm", mixer.norm.kind, "rms"):
        require.one_of(f"{at}.norm.eps", mixer.norm.eps, EPS)
    plain = mixer.head_width or config.width // mixer.heads
    rope = rope_to_hf(config.position)
    scaling = config.position.scaling
    if scaling is not None:
        require.one_of("model.position.scaling", scaling.method, None, "yarn")
    if mixer.scale is not None:
        # The library multiplies the scores by (0.1 mscale_all_dim ln(factor) + 1)^2, with yarn only.
        gain = math.sqrt(mixer.scale * (plain + mixer.rope_width) ** 0.5)
        if scaling is None or scaling.method != "yarn" or scaling.factor <= 1 or gain <= 1:
            require.reject(
                f"{at}.scale", f"transformers has no scale of {mixer.scale}", "null would map."
            )
        else:
            rope["mscale_all_dim"] = (gain - 1) / (0.1 * math.log(scaling.factor))
    if scaling is not None and scaling.method == "yarn":
        rope["attention_factor"] = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return keys_to_hf(MIXER_KEYS, mixer) | {
        "rope_parameters": rope,
        "num_key_value_heads": mixer.heads,
        "qk_nope_head_dim": plain,
        "v_head_dim": mixer.value_width or plain,
        "attention_bias": False,
    }


def _ffns(config: Any, ffns: Sequence[Any], require: Requirements, version: Version) -> Data:
    path = f"{BLOCK}.ffn"
    dense = next(layer for layer, ffn in enumerate(ffns) if ffn.kind == "moe")
    ffn = ffns[dense]
    if any(sparse_ffn != ffn for sparse_ffn in ffns[dense:]) or any(
        dense_ffn != ffns[0] for dense_ffn in ffns[:dense]
    ):
        what = f"{require.architecture} has first equal dense layers, then equal sparse ones"
        require.reject("model.stack.rules", what, "One rule for the first layers would map.")
    require.one_of(f"{path}.router", ffn.router.kind, "group_limited")
    require.one_of(f"{path}.expert", ffn.expert.kind, "gated")
    require.one_of(f"{path}.shared", None if ffn.shared is None else ffn.shared.kind, "gated")
    require.one_of(f"{path}.shared_combine", ffn.shared_combine, "sum")
    require.one_of(f"{path}.capacity_factor", ffn.capacity_factor, None)
    if require.problems:
        return {}
    parts = {
        f"{path}.expert": ffn.expert,
        f"{path}.shared": ffn.shared,
        **({path: ffns[0]} if dense else {}),
    }
    for at, part in parts.items():
        require.one_of(f"{at}.gate", part.gate, "swiglu")
        require.one_of(f"{at}.bias", part.bias, False)
    router = _router(ffn.router, require, version)
    hidden, shared = (gated_hidden(part.hidden, config.width) for part in (ffn.expert, ffn.shared))
    if shared % hidden:
        what = f"{shared} hidden units are no multiple of an expert's {hidden}"
        require.reject(f"{path}.shared.hidden", what, f"A multiple of {hidden} would map.")
    return {
        "intermediate_size": gated_hidden(ffns[0].hidden, config.width) if dense else hidden,
        "moe_intermediate_size": hidden,
        "n_routed_experts": ffn.experts,
        "n_shared_experts": shared // hidden,
        "first_k_dense_replace": dense,
        **router,
    }


def _router(router: Any, require: Requirements, version: Version) -> Data:
    path = f"{BLOCK}.ffn.router"
    require.one_of(f"{path}.score", router.score, "softmax" if version == 2 else "sigmoid")
    require.one_of(f"{path}.balance_over", router.balance_over, "sequence", "micro_batch")
    # A token that takes all groups has the best experts of all, however groups are ranked.
    if version == 3 or router.topk_groups < router.expert_groups:
        require.one_of(f"{path}.group_score", router.group_score, "max" if version == 2 else "top2")
    if version == 2:
        require.one_of(f"{path}.normalise", router.normalise, False)
        require.one_of(f"{path}.bias_update_rate", router.bias_update_rate, 0.0)
    data: Data = keys_to_hf(ROUTER_KEYS, router) | {
        "aux_loss_alpha": router.aux_loss_weight,
        "seq_aux": router.balance_over == "sequence",
    }
    return data | ({"topk_method": "group_limited_greedy"} if version == 2 else {})


def from_hf(data: Data, require: Requirements, version: Version) -> Data:
    require.one_of("hidden_act", data["hidden_act"], "silu", "swish")
    require.one_of("attention_bias", data["attention_bias"], False)
    if version == 3:
        require.one_of("rope_interleave", data["rope_interleave"], True)
    else:
        require.one_of("mlp_bias", data["mlp_bias"], False)
    rope = dict(data["rope_parameters"])
    plain, turned = data["qk_nope_head_dim"], data["qk_rope_head_dim"]
    mixer = keys_from_hf(
        MIXER_KEYS,
        data,
        {
            "kind": "mla",
            "head_width": plain,
            "value_width": data["v_head_dim"],
            "norm": {"kind": "rms", "eps": EPS},
        },
    )
    if (
        rope.get("rope_type", "default") != "default"
        and rope.get("mscale_all_dim")
        and rope["factor"] > 1
    ):
        gain = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        mixer["scale"] = gain**2 * (plain + turned) ** -0.5
    depth, dense = data["num_hidden_layers"], data["first_k_dense_replace"]
    hidden = data["moe_intermediate_size"]
    expert: Data = {"kind": "gated", "gate": "swiglu", "hidden": hidden}
    moe: Data = {
        "kind": "moe",
        "experts": data.get("n_routed_experts", data.get("num_local_experts")),
        "router": _router_from_hf(data, require, version),
        "expert": expert,
        "shared": expert | {"hidden": hidden * data["n_shared_experts"]},
    }
    ffns = [
        {**expert, "hidden": data["intermediate_size"]} if layer < dense else moe
        for layer in range(depth)
    ]
    section = {
        "kind": "decoder",
        "position": rope_from_hf(rope, data, require, methods=("yarn",)),
        "stack": {
            "block": {"mixer": mixer, "ffn": ffns[0], "norm": {"kind": "rms"}},
            "rules": layer_rules(ffns, "ffn"),
        },
    }
    return keys_from_hf(KEYS, data, section)


def _router_from_hf(data: Data, require: Requirements, version: Version) -> Data:
    fixed = {
        "kind": "group_limited",
        "score": "sigmoid" if version == 3 else "softmax",
        "group_score": "top2" if version == 3 else "max",
    }
    router = keys_from_hf(ROUTER_KEYS, data, fixed)
    if data.get("aux_loss_alpha") is not None:
        router["aux_loss_weight"] = float(data["aux_loss_alpha"])
        router["balance_over"] = "sequence" if data.get("seq_aux") else "micro_batch"
    if version == 3:
        return router | {"bias_update_rate": BIAS_UPDATE_RATE}
    if data["norm_topk_prob"]:
        what = "transformers ignores true for deepseek_v2, and DeepSeek's own code does not"
        require.reject("norm_topk_prob", what, "false would map.")
    if require.one_of("topk_method", data["topk_method"], "greedy", "group_limited_greedy"):
        # A token's experts come from all groups: one group of all experts.
        router |= {"expert_groups": 1, "topk_groups": 1} if data["topk_method"] == "greedy" else {}
    return router


def _interleaved(heads: int, plain: int, turned: int) -> Transform:
    """Transform a projection whose heads end in rotated rows: the library has pairs of channels side by side."""
    order = (
        torch.arange(turned).view(2, -1).t().flatten()
    )  # Row of xscale's at each row of the library's.
    rows = torch.cat((torch.arange(plain), plain + order))

    def reorder(tensors: Tensors, index: torch.Tensor) -> Tensors:
        tensor = tensors[0]
        return [tensor.view(heads, plain + turned, *tensor.shape[1:])[:, index].flatten(0, 1)]

    return Transform(
        lambda tensors: reorder(tensors, rows), lambda tensors: reorder(tensors, rows.argsort())
    )


def _key_values(heads: int, plain: int, values: int) -> Transform:
    """Transform the projections of keys and values to one, interleaved by head."""

    def forward(tensors: Tensors) -> Tensors:
        return [
            torch.cat([part.view(heads, -1, part.shape[1]) for part in tensors], 1).flatten(0, 1)
        ]

    def inverse(tensors: Tensors) -> Tensors:
        by_head = tensors[0].view(heads, plain + values, -1)
        return [part.flatten(0, 1) for part in torch.split(by_head, [plain, values], 1)]

    return Transform(forward, inverse)


def weights(config: Any, sizes: ModelSizes, version: Version) -> list[WeightMapping]:
    mapped = [
        weight("embed.table.weight", "model.embed_tokens.weight"),
        weight("stack.norm.weight", "model.norm.weight"),
    ]
    if not config.tied:
        mapped.append(weight("head.weight", "lm_head.weight"))
    for layer in range(config.stack.depth):
        block = config.stack.block_config(layer)
        mapped += per_block(
            1, _mixer_weights(config, block.mixer) + _ffn_weights(block.ffn, version), first=layer
        )
    return mapped


def _mixer_weights(config: Any, mixer: Any) -> list[WeightMapping]:
    at, part = f"{LAYER}.self_attn", f"{MIXER}.part"
    plain = mixer.head_width or config.width // mixer.heads
    queries = _interleaved(mixer.heads, plain, mixer.rope_width)
    layer = [
        weight(f"{MIXER}.norm.weight", f"{LAYER}.input_layernorm.weight"),
        weight(f"{FFN}.norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
        weight(
            f"{part}.kv_down.weight",
            f"{at}.kv_a_proj_with_mqa.weight",
            _interleaved(1, mixer.kv_latent_width, mixer.rope_width),
        ),
        weight(f"{part}.kv_latent_norm.weight", f"{at}.kv_a_layernorm.weight"),
        weight(
            f"{part}.k.weight {part}.v.weight",
            f"{at}.kv_b_proj.weight",
            _key_values(mixer.heads, plain, mixer.value_width or plain),
        ),
        weight(f"{part}.o.weight", f"{at}.o_proj.weight"),
    ]
    if mixer.query_latent_width is None:
        return [*layer, weight(f"{part}.q.weight", f"{at}.q_proj.weight", queries)]
    return [
        *layer,
        weight(f"{part}.q_down.weight", f"{at}.q_a_proj.weight"),
        weight(f"{part}.q_latent_norm.weight", f"{at}.q_a_layernorm.weight"),
        weight(f"{part}.q.weight", f"{at}.q_b_proj.weight", queries),
    ]


def _ffn_weights(ffn: Any, version: Version) -> list[WeightMapping]:
    parts, mlp = ("gate", "up", "down"), f"{LAYER}.mlp"
    if ffn.kind != "moe":
        return [weight(f"{FFN}.part.{part}.weight", f"{mlp}.{part}_proj.weight") for part in parts]
    layer = [weight(f"{FFN}.part.router.weight", f"{mlp}.gate.weight")]
    bias = f"{mlp}.gate.e_score_correction_bias"
    if version == 3 and ffn.router.bias_update_rate:
        layer.append(weight(f"{FFN}.part.router.bias", bias))
    elif version == 3:
        layer.append(weight("", bias, zeros(ffn.experts)))
    for part in parts:
        names = " ".join(
            f"{mlp}.experts.{expert}.{part}_proj.weight" for expert in range(ffn.experts)
        )
        layer.append(weight(f"{FFN}.part.experts.{part}", names, UNSTACKED))
        layer.append(
            weight(f"{FFN}.part.shared.{part}.weight", f"{mlp}.shared_experts.{part}_proj.weight")
        )
    return layer


AUX_LOSS = (
    "aux_loss_alpha: transformers has no auxiliary loss of this architecture; the key is that of DeepSeek's own code, "
    "whose loss is xscale's. A config.json without it becomes a router with xscale's default"
)
SELECTION_BIAS = "selection bias: transformers has no rate of its update, so an import takes DeepSeek-V3's, 0.001"


def _architecture(version: Version, notes: tuple[str, ...]) -> Architecture:
    return Architecture(
        name=f"deepseek_v{version}",
        kind="decoder",
        loader=f"DeepseekV{version}ForCausalLM",
        to_hf=partial(to_hf, version=version),
        from_hf=partial(from_hf, version=version),
        weights=partial(weights, version=version),
        ignored=(r".*rotary_emb\.inv_freq",),
        notes=notes,
        features=frozenset({"position.scaling", "block.mixer.scale"}),
    )


DEEPSEEK_V2 = _architecture(2, (AUX_LOSS,))
DEEPSEEK_V3 = _architecture(3, (AUX_LOSS, SELECTION_BIAS))
