"""GLM-4 (GLM team 2024), GLM-4-0414, Helium, ERNIE 4.5 and its mixture: rotated channels are pairs side by side."""

from collections.abc import Sequence

from xscale.convert.hf.architecture import Data
from xscale.convert.hf.tables.decoders import (
    AUX_LOSS,
    CORE,
    AuxLossKey,
    RopeKeys,
    heads_give_width,
)
from xscale.convert.hf.tables.keys import ByLayer, Initial, LayerKinds, SameKey, merged
from xscale.convert.hf.tables.rotations import rotated_pairs
from xscale.convert.hf.tables.tensors import Moved
from xscale.convert.hf.types.deepseek import SELECTION_BIAS, shared_hidden
from xscale.convert.hf.types.llama import (
    BIAS,
    BY_WIDTH,
    FFN,
    MISTRAL,
    layers,
    mixture,
)
from xscale.convert.mapping import GATE_UP, Transform

ROW = Transform(lambda tensors: [tensors[0][None]], lambda tensors: [tensors[0][0]])
"""A vector that the library has as a matrix of one row."""
PAIRS = layers(
    {
        "mixer.part.q": Moved("self_attn.q_proj", rotated_pairs),
        "mixer.part.k": Moved("self_attn.k_proj", rotated_pairs),
    }
)
HELIUM = MISTRAL.variant(
    "helium",
    "HeliumForCausalLM",
    block={
        "mixer": {**BIAS, "output_bias": False, "core": CORE},
        "ffn": {"bias": SameKey("mlp_bias")},
    },
    tensors=PAIRS,
)
GLM = MISTRAL.variant(
    "glm",
    "GlmForCausalLM",
    model={"position": RopeKeys(partial=True)},
    block={"mixer": {**BIAS, "output_bias": False, "core": CORE}},
    tensors={
        **PAIRS,
        **layers({"ffn.part.gate ffn.part.up": Moved("mlp.gate_up_proj", GATE_UP)}),
    },
    checks=(heads_give_width,),
)
GLM4 = GLM.variant(
    "glm4",
    "Glm4ForCausalLM",
    block={"residual": "sandwich"},
    tensors=layers({"mixer.after": "post_self_attn_layernorm", "ffn.after": "post_mlp_layernorm"}),
)
_USE_BIAS = {"bias": SameKey("use_bias")}
ERNIE4_5 = MISTRAL.variant(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    block={"mixer": {**_USE_BIAS, "core": CORE, "dropout": Initial(0.0)}, "ffn": _USE_BIAS},
    tensors=PAIRS,
    checks=(heads_give_width,),
)


def _kinds(data: Data) -> Sequence[str]:
    first, last = data["moe_layer_start_index"], data["moe_layer_end_index"]
    interval = data["moe_layer_interval"]
    return [
        "sparse" if (layer + 1) % interval == 0 and first <= layer <= last else "dense"
        for layer in range(data["num_hidden_layers"])
    ]


def _bounds(kinds: Sequence[str]) -> Data:
    sparse = [layer for layer, kind in enumerate(kinds) if kind == "sparse"] or [len(kinds)]
    return {
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


_KINDS = LayerKinds(_kinds, _bounds)
_EXPERT = {**FFN, "hidden": SameKey("moe_intermediate_size")}
ERNIE4_5_MOE = ERNIE4_5.variant(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    block=merged(
        BY_WIDTH,
        {
            "mixer": {"bias": False},
            "ffn": ByLayer(
                _KINDS,
                {
                    "sparse": {
                        "kind": "moe",
                        "experts": SameKey("moe_num_experts"),
                        "router": {
                            "kind": "topk",
                            "top_k": SameKey("moe_k"),
                            "normalise": True,
                            "bias_update_rate": Initial(0.001),
                            "aux_loss_weight": AuxLossKey(_KINDS, top_k="moe_k"),
                        },
                        "expert": _EXPERT,
                        "shared": {
                            **_EXPERT,
                            "hidden": shared_hidden("moe_num_shared_experts"),
                        },
                    },
                    "dense": FFN,
                },
                "moe_layer_interval",
            ),
        },
    ),
    # With biases its head has one too. Its least sum of the weights keeps a division by 0 away, which xscale reports.
    fixed={"use_bias": (False,), "moe_norm_min": (1e-12,)},
    tensors=mixture("mlp")
    | layers(
        {
            "ffn.part.router.bias": Moved("mlp.moe_statics.e_score_correction_bias", ROW),
            "ffn.part.shared.gate": "mlp.shared_experts.gate_proj",
            "ffn.part.shared.up": "mlp.shared_experts.up_proj",
            "ffn.part.shared.down": "mlp.shared_experts.down_proj",
        }
    ),
    notes=(AUX_LOSS, SELECTION_BIAS),
)
