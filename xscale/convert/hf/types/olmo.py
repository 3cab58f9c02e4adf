"""OLMo 2 (Walsh et al. 2025), OLMo 3, OLMoE (Muennighoff et al. 2024) and FlexOlmo (Shi et al. 2025)."""

from xscale.convert.hf.tables.decoders import (
    AUX_LOSS,
    CORE,
    FULL,
    LOCAL,
    RopeKeys,
    WindowKey,
    experts,
    windows_by_layer,
)
from xscale.convert.hf.tables.keys import Initial, merged
from xscale.convert.hf.types.llama import (
    BIAS,
    BY_WIDTH,
    MISTRAL,
    NORM,
    QK_NORMS,
    layers,
    mixture,
)

WIDE_NORM = {"qk_norm": NORM, "qk_norm_over": "heads"}
NORMS_AFTER = layers(
    {"mixer.norm": "post_attention_layernorm", "ffn.norm": "post_feedforward_layernorm"}
)
EXPERTS = experts(hidden="intermediate_size")
OLMO2 = MISTRAL.variant(
    "olmo2",
    "Olmo2ForCausalLM",
    block=merged(BY_WIDTH, {"mixer": {**BIAS, **WIDE_NORM, "core": CORE}, "residual": "res_post"}),
    tensors={**QK_NORMS, **NORMS_AFTER},
)
OLMOE = MISTRAL.variant(
    "olmoe",
    "OlmoeForCausalLM",
    block=merged(
        BY_WIDTH,
        {"mixer": {**BIAS, **WIDE_NORM, "core": CORE}, "ffn": EXPERTS},
    ),
    fixed={"clip_qkv": (None,)},
    tensors={**QK_NORMS, **mixture("mlp")},
    notes=(AUX_LOSS,),
)
FLEX_OLMO = OLMO2.variant(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    block={"ffn": EXPERTS},
    tensors=mixture("mlp"),
    notes=(AUX_LOSS,),
)
_MIXER = OLMO2.model["stack"].block["mixer"]
OLMO3 = OLMO2.variant(
    "olmo3",
    "Olmo3ForCausalLM",
    model={"position": RopeKeys(section=FULL, also=LOCAL)},
    # Scaled frequencies are those of the layers without a window.
    block={
        "mixer": windows_by_layer(
            merged(_MIXER, {"core": CORE, "position": Initial(None)}),
            merged(_MIXER, {"core": WindowKey(some=True), "position": RopeKeys(section=LOCAL)}),
        )
    },
)
