"""LLaMA (Touvron et al. 2023) and its variants: Mistral, Qwen2 and 3 with their mixtures, Mixtral, Phi-3 and others."""

from collections.abc import Sequence
from typing import Any

from xscale.convert.hf.architecture import Data
from xscale.convert.hf.tables.decoders import (
    AUX_LOSS,
    CORE,
    LOCAL,
    SOME_WINDOWS,
    AuxLossKey,
    RopeKeys,
    WindowKey,
    experts,
    heads_divide_width,
    heads_give_width,
    longest_window,
    some_windows,
    windows_by_layer,
)
from xscale.convert.hf.tables.keys import ByLayer, Initial, LayerKinds, SameKey, Table, merged
from xscale.convert.hf.tables.model_type import ModelType
from xscale.convert.hf.tables.stack import StackTable
from xscale.convert.hf.tables.tensors import (
    Absent,
    Moved,
    RowContext,
    Rows,
    Tensors,
    blocks,
    rows_concatenated,
)
from xscale.convert.mapping import GATE_UP

NORM = {"kind": "rms", "eps": SameKey("rms_norm_eps")}
FFN = {"kind": "gated", "gate": "swiglu", "hidden": SameKey("intermediate_size"), "bias": False}
BLOCK: Table = {
    "mixer": {
        "kind": "attention",
        "heads": SameKey("num_attention_heads"),
        "kv_heads": SameKey("num_key_value_heads", "=num_attention_heads"),
        "head_width": SameKey("head_dim"),
        "core": WindowKey(),
        "bias": False,
        "dropout": SameKey("attention_dropout"),
    },
    "ffn": FFN,
    "norm": NORM,
    "residual": "pre",
}
BY_WIDTH = {"mixer": {"head_width": Initial(None)}}
"""Head width of types that have it as width / heads, and no other."""
BIAS = {"bias": SameKey("attention_bias")}
MODEL: Table = {
    "kind": "decoder",
    "width": SameKey("hidden_size"),
    "position": RopeKeys(),
    "tied": SameKey("tie_word_embeddings"),
    "dropout": Initial(0.0),
    "init_std": SameKey("initializer_range"),
    "stack": StackTable("num_hidden_layers", BLOCK),
}


def layers(rows: Tensors) -> Rows:
    """Return the rows of a block, after the prefixes of its names."""
    return blocks("stack.blocks.{i}", "model.layers.{i}", rows)


def mixture(module: str, router: str = "gate", parts: str = "gate_proj up_proj down_proj") -> Rows:
    """Return the rows of a mixture: its module, its router, and the projections of an expert."""
    names = dict(zip(("gate", "up", "down"), parts.split(), strict=True))
    return layers(
        {"ffn.part.router": f"{module}.{router}"}
        | {
            f"ffn.part.experts.{part}": f"{module}.experts.{{e}}.{name}.weight"
            for part, name in names.items()
        }
    )


TENSORS: Rows = {
    "embed.table": "model.embed_tokens",
    "stack.norm": "model.norm",
    "head": "lm_head",
    **layers(
        {
            "mixer.norm": "input_layernorm",
            "mixer.part.q": "self_attn.q_proj",
            "mixer.part.k": "self_attn.k_proj",
            "mixer.part.v": "self_attn.v_proj",
            "mixer.part.o": "self_attn.o_proj",
            "ffn.norm": "post_attention_layernorm",
            "ffn.part.gate": "mlp.gate_proj",
            "ffn.part.up": "mlp.up_proj",
            "ffn.part.down": "mlp.down_proj",
        }
    ),
}


def missing_bias(row: RowContext) -> tuple[int] | None:
    """Return the shape of a selection bias of a router that has none in xscale; None: it has one, or is none."""
    ffn = row.block.ffn
    return (ffn.experts,) if ffn.kind == "moe" and not ffn.router.bias_update_rate else None


QK_NORMS = layers(
    {"mixer.part.q_norm": "self_attn.q_norm", "mixer.part.k_norm": "self_attn.k_norm"}
)
HEAD_NORM = {"qk_norm": NORM, "qk_norm_over": "head"}
QWEN_BIAS = {"bias": True, "output_bias": False}

MISTRAL = ModelType(
    name="mistral",
    loader="MistralForCausalLM",
    model=MODEL,
    tensors=TENSORS,
    fixed={"hidden_act": ("silu", "swish")},
    checks=(heads_give_width, heads_divide_width),
    attention_span=longest_window,
)
LLAMA = MISTRAL.variant(
    "llama",
    "LlamaForCausalLM",
    block={"mixer": {"core": CORE, **BIAS}, "ffn": {"bias": SameKey("mlp_bias")}},
)
QWEN2 = MISTRAL.variant(
    "qwen2",
    "Qwen2ForCausalLM",
    block=merged(BY_WIDTH, {"mixer": {**QWEN_BIAS, "core": SOME_WINDOWS}}),
    ignored_keys=frozenset({"max_window_layers"}),
)
QWEN3 = MISTRAL.variant(
    "qwen3",
    "Qwen3ForCausalLM",
    block={"mixer": {**BIAS, **HEAD_NORM, "core": SOME_WINDOWS}},
    tensors=QK_NORMS,
    ignored_keys=frozenset({"max_window_layers"}),
    checks=(heads_give_width,),
)
MIXTRAL = MISTRAL.variant(
    "mixtral",
    "MixtralForCausalLM",
    block={
        "ffn": merged(
            experts("num_local_experts", "intermediate_size"), {"router": {"normalise": True}}
        )
    },
    # transformers' jitter also multiplies what the experts read, and xscale's only what the router reads.
    fixed={"router_jitter_noise": (0.0, None)},
    tensors=mixture("block_sparse_moe", parts="w1 w3 w2"),
    notes=(AUX_LOSS,),
    checks=(heads_give_width,),
)


def _sparse_kinds(data: Data) -> Sequence[str]:
    """Return the kind of each layer's feed-forward part in Qwen3-MoE."""
    experts = data.get("num_experts") or data.get("num_local_experts")
    return [
        "sparse"
        if experts
        and layer not in (data["mlp_only_layers"] or [])
        and (layer + 1) % data["decoder_sparse_step"] == 0
        else "dense"
        for layer in range(data["num_hidden_layers"])
    ]


def _dense_layers(kinds: Sequence[str]) -> Data:
    layers = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    return {"decoder_sparse_step": 1, "mlp_only_layers": layers}


SPARSE_STEP = LayerKinds(_sparse_kinds, _dense_layers)
QWEN3_MOE = QWEN3.variant(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    block={
        "mixer": {"core": WindowKey()},
        "ffn": ByLayer(
            SPARSE_STEP,
            {
                "sparse": merged(
                    experts(), {"router": {"aux_loss_weight": AuxLossKey(SPARSE_STEP)}}
                ),
                "dense": FFN,
            },
        ),
    },
    tensors=mixture("mlp"),
    notes=(AUX_LOSS,),
)


QWEN2_MOE = QWEN2.variant(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    block={
        "mixer": {"bias": SameKey("qkv_bias"), "output_bias": False},
        "ffn": ByLayer(
            SPARSE_STEP,
            {
                "sparse": merged(
                    experts(),
                    {
                        "router": {"aux_loss_weight": AuxLossKey(SPARSE_STEP)},
                        "shared": {**FFN, "hidden": SameKey("shared_expert_intermediate_size")},
                        "shared_combine": "gate",
                    },
                ),
                "dense": FFN,
            },
        ),
    },
    tensors=mixture("mlp")
    | layers(
        {
            "ffn.part.mix": "mlp.shared_expert_gate",
            "ffn.part.shared.gate": "mlp.shared_expert.gate_proj",
            "ffn.part.shared.up": "mlp.shared_expert.up_proj",
            "ffn.part.shared.down": "mlp.shared_expert.down_proj",
        }
    ),
    notes=(AUX_LOSS,),
)


def _pad(config: Any, sizes: Any) -> Data:
    # The library's default is an id beyond small vocabularies.
    return {"pad_token_id": sizes.pad}


PHI3 = MISTRAL.variant(
    "phi3",
    "Phi3ForCausalLM",
    model={"position": RopeKeys(partial=True, methods=()), "dropout": SameKey("embd_pdrop")},
    block={**BY_WIDTH, "dropout": SameKey("resid_pdrop")},
    tensors=layers(
        {
            "mixer.part.q mixer.part.k mixer.part.v": Moved(
                "self_attn.qkv_proj", rows_concatenated
            ),
            "ffn.part.gate ffn.part.up": Moved("mlp.gate_up_proj", GATE_UP),
        }
    ),
    writes=_pad,
    ignored_keys=frozenset({"original_max_position_embeddings"}),
)
MINISTRAL = MISTRAL.variant(
    "ministral",
    "MinistralForCausalLM",
    block={"mixer": {"core": windows_by_layer()}},
    checks=(heads_give_width,),
)
CWM = LLAMA.variant(
    "cwm",
    "CwmForCausalLM",
    block={"mixer": {"bias": False, "core": windows_by_layer()}},
    checks=(heads_give_width,),
)
SEED_OSS = LLAMA.variant(
    "seed_oss",
    "SeedOssForCausalLM",
    block={
        "mixer": {"output_bias": SameKey("attention_out_bias")},
        "dropout": SameKey("residual_dropout"),
    },
    checks=(heads_give_width,),
)
MINIMAX_M2 = MIXTRAL.variant(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    model={"position": RopeKeys(partial=True)},
    block={
        "mixer": {"core": CORE, "qk_norm": NORM, "qk_norm_over": "heads"},
        "ffn": {"router": {"score": "sigmoid", "bias_update_rate": Initial(0.001)}},
    },
    tensors=QK_NORMS | layers({"ffn.part.router.bias": "block_sparse_moe.e_score_correction_bias"}),
    absent={"model.layers.{i}.block_sparse_moe.e_score_correction_bias": Absent(missing_bias)},
)

SMOLLM3 = LLAMA.variant(
    "smollm3",
    "SmolLM3ForCausalLM",
    block={
        "mixer": {
            "core": some_windows(lambda kinds: {"use_sliding_window": LOCAL in kinds}),
            "position": ByLayer(LayerKinds.listed("no_rope_layers"), {1: Initial(None), 0: "none"}),
        }
    },
    checks=(heads_give_width,),
    ignored_keys=frozenset({"no_rope_layer_interval"}),
)
