"""gpt-oss (OpenAI 2025): LLaMA's blocks with attention sinks, alternating windows, and experts of a clamped gated unit.

An expert is act(gate) * (up + 1) with biases, gate clamped from above and up on both sides, where act is
x sigmoid(alpha x). The router's logits have a bias; its weights are a softmax over the chosen ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from xscale.convert.hf.architecture import Data, Requirements
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.hf.layers import core_of, layer_types, window_of_some, windows_of
from xscale.convert.hf.llama import LlamaFamily
from xscale.convert.hf.llama_variant import BLOCK
from xscale.convert.hf.llama_weights import FFN, LAYER, MIXER
from xscale.convert.hf.mxfp4 import METHOD
from xscale.convert.mapping import TRANSPOSED_EXPERTS, Tensors, Transform, WeightMapping, weight
from xscale.nn.ffn.ffn import gated_hidden

ALPHAS = {"quick_geglu": 1.702, "swiglu": 1.0}
"""Kind of the gate -> alpha of its activation x sigmoid(alpha x)."""


def _interleave(tensors: Tensors) -> Tensors:
    return [torch.stack(tensors, -1).flatten(-2)]


INTERLEAVED = Transform(_interleave, lambda tensors: [tensors[0][..., ::2], tensors[0][..., 1::2]])
"""Biases of the experts' gate and up projection [E, F] -> one [E, 2 * F], in turns."""
INTERLEAVED_TRANSPOSED = Transform(
    lambda tensors: _interleave([tensor.mT for tensor in tensors]),
    lambda tensors: [tensors[0][..., ::2].mT, tensors[0][..., 1::2].mT],
)
"""The experts' gate and up projection [E, F, D] -> one [E, D, 2 * F], columns in turns."""

MOE_KEYS = {
    "num_local_experts": "experts",
    "num_experts_per_tok": "router.top_k",
    "swiglu_limit": "expert.clamp_value",
}
"""Keys of a mixture with the same value, in both directions."""


@dataclass(frozen=True)
class GptOssFamily(LlamaFamily):
    """gpt-oss: what it has besides LLaMA's fields."""

    def _windows(self, blocks: Sequence[Any], require: Requirements) -> Data:
        sinks = all(getattr(block.mixer.core, "sinks", False) for block in blocks)
        require.one_of(f"{BLOCK}.mixer.core.sinks", sinks, True)
        windows = windows_of(blocks, require)
        window = window_of_some(windows, require)
        # The library's mask needs a size even if no layer has it: without the key it is the library's default.
        return {
            "layer_types": layer_types(windows),
            **({} if window is None else {"sliding_window": window}),
        }

    def _mixture(self, config: Any, ffns: Sequence[Any], require: Requirements) -> Data:
        ffn, path = ffns[0], f"{BLOCK}.ffn"
        require.one_of(f"{path}.router", ffn.router.kind, "topk")
        require.one_of(f"{path}.expert", ffn.expert.kind, "gated")
        require.one_of(f"{path}.shared", None if ffn.shared is None else ffn.shared.kind, None)
        require.one_of(f"{path}.capacity_factor", ffn.capacity_factor, None)
        if require.problems:
            return {}
        expert, router = ffn.expert, ffn.router
        require.one_of(f"{path}.expert.gate", expert.gate, *ALPHAS)
        require.one_of(f"{path}.expert.bias", expert.bias, True)
        require.one_of(f"{path}.expert.linear_offset", expert.linear_offset, 1.0)
        if expert.clamp_value is None:
            require.reject(
                f"{path}.expert.clamp_value",
                f"{self.name} clamps, and there is no clamp",
                "7 would map.",
            )
        require.one_of(f"{path}.router.logit_bias", router.logit_bias, True)
        require.one_of(f"{path}.router.score", router.score, "softmax")
        require.one_of(f"{path}.router.normalise", router.normalise, True)
        require.one_of(f"{path}.router.scale", router.scale, 1.0)
        require.one_of(f"{path}.router.bias_update_rate", router.bias_update_rate, 0.0)
        return keys_to_hf(MOE_KEYS, ffn) | {
            "intermediate_size": gated_hidden(expert.hidden, config.width),
            "router_aux_loss_coef": router.aux_loss_weight * len(ffns) / router.top_k,
            "swiglu_alpha": ALPHAS.get(expert.gate),
        }

    def _our_mixer(
        self, data: Data, norm: Data, window: int | None, layer: int, require: Requirements
    ) -> Data:
        mixer = super()._our_mixer(data, norm, window, layer, require)
        return mixer | {"core": core_of(window) | {"sinks": True}}

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of("swiglu_alpha", data["swiglu_alpha"], *ALPHAS.values())
        return super().from_hf(data, require)

    def _our_mixture(self, data: Data) -> Data:
        gates = {alpha: gate for gate, alpha in ALPHAS.items()}
        chosen = data["num_experts_per_tok"]
        section = {
            "kind": "moe",
            "router": {
                "kind": "topk",
                "logit_bias": True,
                "aux_loss_weight": float(data["router_aux_loss_coef"])
                * chosen
                / data["num_hidden_layers"],
            },
            "expert": {
                "kind": "gated",
                "gate": gates.get(data["swiglu_alpha"], "quick_geglu"),
                "hidden": data["intermediate_size"],
                "bias": True,
                "linear_offset": 1.0,
            },
        }
        return keys_from_hf(MOE_KEYS, data, section)

    def _mixer_weights(self, config: Any, mixer: Any) -> list[WeightMapping]:
        return [
            *super()._mixer_weights(config, mixer),
            weight(f"{MIXER}.part.core.sinks", f"{LAYER}.self_attn.sinks"),
        ]

    def _ffn_weights(self, ffn: Any) -> list[WeightMapping]:
        part, mlp = f"{FFN}.part", f"{LAYER}.mlp"
        experts, hf_experts = f"{part}.experts", f"{mlp}.experts"
        return [
            weight(f"{part}.router.weight", f"{mlp}.router.weight"),
            weight(f"{part}.router.logit_bias", f"{mlp}.router.bias"),
            weight(
                f"{experts}.gate {experts}.up", f"{hf_experts}.gate_up_proj", INTERLEAVED_TRANSPOSED
            ),
            weight(
                f"{experts}.gate_bias {experts}.up_bias",
                f"{hf_experts}.gate_up_proj_bias",
                INTERLEAVED,
            ),
            weight(f"{experts}.down", f"{hf_experts}.down_proj", TRANSPOSED_EXPERTS),
            weight(f"{experts}.down_bias", f"{hf_experts}.down_proj_bias"),
        ]


_family = GptOssFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    bias="optional",
    windows="layers",
    experts="mlp",
    features=(
        "block.mixer.core.sinks",
        "block.ffn.expert.clamp_value",
        "block.ffn.expert.linear_offset",
        "block.ffn.router.logit_bias",
    ),
)
GPT_OSS = replace(_family.architecture(), quantization=(METHOD,))
