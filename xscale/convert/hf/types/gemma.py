"""Gemma 2 (Gemma team 2024) and Gemma 3 (2025), its text models: LLaMA's blocks with four norms, caps and windows."""

from xscale.convert.hf.tables.decoders import (
    CORE,
    FULL,
    LOCAL,
    InverseSqrtKey,
    RopeKeys,
    WindowKey,
    windows_by_layer,
)
from xscale.convert.hf.tables.keys import Initial, SameKey, merged
from xscale.convert.hf.tables.tensors import Moved
from xscale.convert.hf.types.llama import BIAS, HEAD_NORM, LLAMA, MISTRAL, layers
from xscale.convert.mapping import shifted

ONE_PLUS = shifted(1.0)
"""The library multiplies by 1 + weight."""
CAPPED = {**CORE, "soft_cap": SameKey("attn_logit_softcapping")}
NORMS = {
    "mixer.norm": "input_layernorm",
    "mixer.after": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.after": "post_feedforward_layernorm",
    "mixer.part.q_norm": "self_attn.q_norm",
    "mixer.part.k_norm": "self_attn.k_norm",
}
SCALINGS = ("linear", "llama3", "yarn")
"""Scalings that may differ between layers: the library has one longest text for dynamic scaling."""

GEMMA2 = LLAMA.variant(
    "gemma2",
    "Gemma2ForCausalLM",
    model={"scale_embeddings": True, "logit_soft_cap": SameKey("final_logit_softcapping")},
    block={
        "mixer": {
            "scale": InverseSqrtKey("query_pre_attn_scalar"),
            "core": windows_by_layer(CAPPED, WindowKey(CAPPED, some=True)),
        },
        "ffn": {"gate": "geglu_tanh", "bias": False},
        "residual": "sandwich",
    },
    fixed={
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    tensors={
        "stack.norm": Moved("model.norm", ONE_PLUS),
        **layers({name: Moved(norm, ONE_PLUS) for name, norm in NORMS.items()}),
    },
)
_GLOBAL_MIXER = {"core": CORE, "position": Initial(None)}
_LOCAL_MIXER = {"core": WindowKey(some=True), "position": RopeKeys(methods=SCALINGS, section=LOCAL)}
_MIXER = merged(
    MISTRAL.model["stack"].block["mixer"],
    {**BIAS, **HEAD_NORM, "scale": InverseSqrtKey("query_pre_attn_scalar")},
)
GEMMA3 = GEMMA2.variant(
    "gemma3_text",
    "Gemma3ForCausalLM",
    model={"position": RopeKeys(methods=SCALINGS, section=FULL, also=LOCAL)},
    block={"mixer": windows_by_layer(merged(_MIXER, _GLOBAL_MIXER), merged(_MIXER, _LOCAL_MIXER))},
    fixed={"attn_logit_softcapping": (None,)},
)
