"""Small models of every architecture that converts, with weights large enough that a mistake shows in the logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xscale.checkpoint.save import save
from xscale.convert.hf.registry import model_of
from xscale.core.config import encode
from xscale.data.config import DataConfig
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS

VOCABULARY, LENGTH = 320, 24
GROUPED = {"kind": "attention", "heads": 4, "kv_heads": 2}
PLAIN = {"kind": "attention", "heads": 4}
BIASED = {**PLAIN, "bias": True}
INPUTS = {"bias": True, "output_bias": False}
WIDE_NORM = {"qk_norm": "rms", "qk_norm_over": "heads"}
GATED = {"kind": "gated", "hidden": 48}
DENSE = {"kind": "dense", "hidden": 64, "activation": "relu"}
MIXTURE = {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}, "expert": GATED}
SWITCH = {"kind": "moe", "experts": 4, "router": "switch", "expert": DENSE, "capacity_factor": 1.25}


def decoder(
    mixer: Any, ffn: Any, norm: Any = "rms", position: Any = "rope", residual: str = "pre", **rest: Any
) -> dict[str, Any]:
    block = {"mixer": mixer, "ffn": ffn, "norm": norm, "residual": residual}
    return {"kind": "decoder", "width": 32, "position": position, "stack": {"depth": 2, "block": block}, **rest}


def layered(mixer: Any, ffn: Any, depth: int, rules: Any, **rest: Any) -> dict[str, Any]:
    made = decoder(mixer, ffn, **rest)
    made["stack"] |= {"depth": depth, "rules": rules}
    return made


def gemma(core: Any, local: Any = None, **rest: Any) -> dict[str, Any]:
    """Windows in every second block, the first with one; `core` is a key of all cores, `local` of mixers with one."""
    outer = {key: rest.pop(key) for key in ("logit_soft_cap", "position") if key in rest}
    mixer = {**GROUPED, **rest, "core": {"kind": "softmax", **core}}
    window = {**banded(6, **rest), **(local or {})}
    window["core"] = {**window["core"], **core}
    ffn = {**GATED, "gate": "geglu_tanh"}
    rules = [{"every": 2, "at": 1, "mixer": mixer}]
    return layered(window, ffn, 3, rules, residual="sandwich", scale_embeddings=True, **outer)


def gpt_oss(position: Any, gate: str = "quick_geglu", **changes: Any) -> dict[str, Any]:
    """Windows in every second block, the first with one; sinks in all, and a clamp that the weights reach."""
    expert = {**GATED, "gate": gate, "bias": True, "clamp_value": 0.5, "linear_offset": 1.0}
    router = {"kind": "topk", "top_k": 2, "logit_bias": True}
    moe = {"kind": "moe", "experts": 4, "router": router, "expert": expert}
    keys = {"bias": True, "head_width": 16, **changes}
    window = banded(6, **keys)
    window["core"] = {**window["core"], "sinks": True}
    rules = [{"every": 2, "at": 1, "mixer": {**GROUPED, **keys, "core": {"kind": "softmax", "sinks": True}}}]
    return layered(window, moe, 3, rules, position=position, tied=False)


def neox(residual: str, position: Any) -> dict[str, Any]:
    made = decoder(BIASED, {"kind": "dense", "hidden": 64, "bias": True}, "layer", position)
    made["stack"]["block"]["residual"] = residual
    return made


def deepseek(mixer: Any, position: Any, **changes: Any) -> dict[str, Any]:
    """A dense layer, then sparse ones; `changes` are those of V3's router."""
    router = {"kind": "group_limited", "top_k": 2, "score": "sigmoid", "group_score": "top2", "bias_update_rate": 0.001}
    router |= {"expert_groups": 2, "topk_groups": 1, "scale": 1.5, **changes}
    moe = {"kind": "moe", "experts": 4, "router": router, "expert": {**GATED, "hidden": 24}, "shared": GATED}
    sizes = {"kv_latent_width": 12, "head_width": 8, "rope_width": 4, "value_width": 10}
    mla = {"kind": "mla", "heads": 4, **sizes, **mixer}
    rules = [{"first": 1, "ffn": moe}]
    return layered(mla, {**GATED, "hidden": 40}, 3, rules, position=position, tied=False)


V2_ROUTER = {"score": "softmax", "group_score": "max", "bias_update_rate": 0.0, "normalise": False}
"""Keys of DeepSeek-V2's router that differ from V3's."""


def encoder(mixer: Any = BIASED, activation: str = "gelu", **rest: Any) -> dict[str, Any]:
    ffn = {"kind": "dense", "bias": True, "activation": activation}
    block = {"mixer": mixer, "ffn": ffn, "norm": {"kind": "layer", "eps": 1e-12}, "residual": "post"}
    around = {"embedding_norm": block["norm"], "transform": activation, "head_bias": True}
    return {
        "kind": "encoder",
        "width": 32,
        "position": "learned",
        "stack": {"depth": 2, "block": block},
        **around,
        **rest,
    }


def deberta(buckets: int | None, activation: str, **changes: Any) -> dict[str, Any]:
    """One table of distances for all blocks, with its norm unless `norm` is None."""
    made = encoder(activation=activation)
    norm = changes.pop("norm", made["stack"]["block"]["norm"])
    made["position"] = {"kind": "deberta", "buckets": buckets, "distance": 9, "norm": norm, "shared": True}
    return {**made, **changes}


def xlnet(activation: str, **changes: Any) -> dict[str, Any]:
    made = encoder(PLAIN, activation, position="transformer_xl")
    return {**made, "embedding_norm": None, "transform": None, **changes}


def windowed(side: int, **rest: Any) -> dict[str, Any]:
    """Attention to so many tokens on each side, in blocks of which a text has several."""
    core = {"kind": "block_sparse", "block": 4, "pattern": {"kind": "band", "left": side, "right": side}}
    return {**BIASED, "core": core | rest}


def banded(left: int, **rest: Any) -> dict[str, Any]:
    """Causal attention to the token itself and so many before it."""
    return {**GROUPED, "core": {"kind": "block_sparse", "block": 4, "pattern": {"kind": "band", "left": left}}, **rest}


def scaled(method: str, **rest: Any) -> dict[str, Any]:
    return {"kind": "rope", "base": 500.0, "scaling": {"method": method, "factor": 4.0, **rest}}


def longformer(*sides: int, **rest: Any) -> dict[str, Any]:
    made = encoder(windowed(sides[0], **rest))
    made["stack"]["rules"] = [{"first": at, "mixer": windowed(side)} for at, side in enumerate(sides) if at]
    return made


def both(ffn: Any, depth: int = 2, rules: Any = (), mixer: Any = PLAIN, **rest: Any) -> dict[str, Any]:
    stack = {"depth": depth, "block": {"mixer": mixer, "ffn": ffn, "norm": "rms"}, "rules": rules}
    return {"kind": "encoder_decoder", "width": 32, "encoder": stack, "decoder": stack, "position": "none", **rest}


def bart(**rest: Any) -> dict[str, Any]:
    norm = {"kind": "layer", "eps": 1e-5}
    stacks = {
        name: {
            "depth": depth,
            "block": {
                "mixer": {**BIASED, "heads": heads},
                "ffn": {"kind": "dense", "hidden": hidden, "bias": True, "activation": "gelu"},
                "norm": norm,
                "residual": "post",
            },
        }
        for name, depth, heads, hidden in (("encoder", 2, 4, 48), ("decoder", 3, 2, 40))
    }
    return {"kind": "encoder_decoder", "width": 32, "position": "learned", "embedding_norm": norm, **stacks, **rest}


T5 = {
    "mixer": {**PLAIN, "scale": 1.0},
    "position": {"kind": "relative", "buckets": 18, "distance": 20, "shared": True},
    "scale_head": True,
}
"""Keys of T5 besides its blocks: unscaled scores, one table of biases for all blocks, a scaled head."""

SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", decoder(GROUPED, GATED)),
    "llama with biases": ("llama", decoder({**GROUPED, "bias": True}, {**GATED, "bias": True}, tied=False)),
    "mistral": ("mistral", decoder(GROUPED, GATED, tied=False, position={"kind": "rope", "base": 500.0})),
    "qwen2": ("qwen2", decoder({**GROUPED, "bias": True, "output_bias": False}, GATED)),
    "qwen3": ("qwen3", decoder({**GROUPED, "qk_norm": "rms", "head_width": 16}, GATED)),
    "mixtral": ("mixtral", decoder(GROUPED, MIXTURE, tied=False)),
    "qwen3_moe": ("qwen3_moe", decoder({**GROUPED, "qk_norm": "rms"}, MIXTURE)),
    "llama, linear scaling": ("llama", decoder(GROUPED, GATED, position=scaled("linear"))),
    "llama, dynamic scaling": ("llama", decoder(GROUPED, GATED, position=scaled("dynamic", original_length=LENGTH))),
    "llama, llama3 scaling": ("llama", decoder(GROUPED, GATED, position=scaled("llama3", original_length=9))),
    "llama, yarn scaling": ("llama", decoder(GROUPED, GATED, position=scaled("yarn", original_length=9))),
    "mistral with a window": ("mistral", decoder(banded(6), GATED)),
    "qwen2 with windows": (
        "qwen2",
        layered({**GROUPED, **INPUTS}, GATED, 3, [{"first": 1, "mixer": banded(6, **INPUTS)}]),
    ),
    "qwen3_moe with dense layers": (
        "qwen3_moe",
        layered({**GROUPED, "qk_norm": "rms"}, MIXTURE, 4, [{"every": 2, "ffn": {**GATED, "hidden": 40}}]),
    ),
    "phi3": ("phi3", decoder(GROUPED, GATED, position={"kind": "rope", "fraction": 0.5})),
    "olmo2": ("olmo2", decoder({**GROUPED, **WIDE_NORM}, GATED, residual="res_post")),
    "olmoe": ("olmoe", decoder({**GROUPED, **WIDE_NORM}, MIXTURE)),
    "gpt_oss": ("gpt_oss", gpt_oss(scaled("yarn", original_length=9, truncate=False))),
    "gpt_oss, swiglu": ("gpt_oss", gpt_oss("rope", gate="swiglu", bias=False)),
    "gemma2": ("gemma2", gemma({"soft_cap": 2.0}, scale=12.0**-0.5, head_width=16, logit_soft_cap=4.0)),
    "gemma3": (
        "gemma3_text",
        gemma(
            {}, {"position": {"kind": "rope", "base": 50.0}}, scale=8.0**-0.5, qk_norm="rms", position=scaled("linear")
        ),
    ),
    "pythia": ("gpt_neox", neox("parallel", {"kind": "rope", "fraction": 0.25})),
    "gpt_neox, sequential": ("gpt_neox", neox("pre", {**scaled("linear"), "fraction": 0.5})),
    "deepseek_v3": (
        "deepseek_v3",
        deepseek({"query_latent_width": 20, "scale": 0.4}, scaled("yarn", original_length=9)),
    ),
    "deepseek_v3, whole queries": ("deepseek_v3", deepseek({}, "rope")),
    "deepseek_v2": (
        "deepseek_v2",
        deepseek({"query_latent_width": 20, "scale": 0.4}, scaled("yarn", original_length=9), **V2_ROUTER),
    ),
    "deepseek_v2, lite": (
        "deepseek_v2",
        deepseek({}, "rope", **V2_ROUTER, expert_groups=1, balance_over="sequence"),
    ),
    "gpt2": (
        "gpt2",
        decoder(BIASED, {"kind": "dense", "activation": "gelu_tanh", "bias": True}, "layer", "learned"),
    ),
    "bert": ("bert", encoder()),
    "roberta": ("roberta", encoder()),
    "albert": ("albert", {**encoder(activation="gelu_tanh"), "embedding_width": 12}),
    "albert with types": ("albert", {**encoder(), "embedding_width": 20, "token_types": 2, "tied": False}),
    "distilbert": ("distilbert", encoder()),
    "distilbert untied": ("distilbert", encoder(activation="relu", tied=False)),
    "big_bird": ("big_bird", encoder(activation="gelu_tanh")),
    "longformer": ("longformer", longformer(3)),
    "longformer of two windows": ("longformer", longformer(2, 4)),
    "longformer with global tokens": (
        "longformer",
        encoder({**windowed(3), "kind": "longformer", "global_token_indices": [0, 5]}),
    ),
    "deberta_v2": ("deberta-v2", deberta(8, "gelu")),
    "deberta_v2 of distances": ("deberta-v2", deberta(None, "relu", norm=None, token_types=2, tied=False)),
    "xlnet": ("xlnet", xlnet("gelu")),
    "xlnet untied": ("xlnet", xlnet("relu", tied=False)),
    "t5": ("t5", both(DENSE)),
    "t5 of one table": ("t5", both(DENSE, 3, **T5)),
    "flan": ("t5", both({**GATED, "gate": "geglu_tanh"}, tied=False, **T5 | {"scale_head": False})),
    "t5 v1.1": ("t5", both({**GATED, "gate": "geglu"}, tied=False)),
    "switch of one table": (
        "switch_transformers",
        both(DENSE, 3, [{"every": 3, "at": 1, "ffn": SWITCH}], **T5),
    ),
    "bart": ("bart", bart()),
    "bart with scaled embeddings": ("bart", bart(scale_embeddings=True)),
    "switch": ("switch_transformers", both(DENSE, 4, [{"every": 2, "at": 1, "ffn": SWITCH}])),
}
"""Name -> architecture and `model` section."""
for section in (SECTIONS["albert"][1], SECTIONS["albert with types"][1]):
    section["stack"] = {**section["stack"], "share": "all"}


def drawn(section: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights by parameter name; norms and biases too are other than they start."""
    with torch.device("meta"):
        model = MODELS.build(model_of(section), VOCABULARY, LENGTH)
    materialize(model, seed)
    noise = torch.Generator().manual_seed(seed)
    return {
        name: value.detach() * (1 if value.dim() == 1 else 4) + 0.1 * torch.randn(value.shape, generator=noise)
        for name, value in model.named_parameters()
    }


def checkpoint(folder: Path, section: dict[str, Any], data: DataConfig | None = None) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of that model, and its weights. Without `data` its tokenizer is that of bytes."""
    weights = drawn(section)
    tokens = encode(data or DataConfig.model_validate({"tokenizer": {"kind": "byte", "sentinels": 10}}))
    config = {"model": encode(model_of(section)), "data": tokens | {"sequence_length": LENGTH}}
    return save(folder, 0, {f"model.{name}": one for name, one in weights.items()}, {}, config), weights
