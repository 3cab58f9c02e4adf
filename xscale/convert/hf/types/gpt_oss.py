"""gpt-oss (OpenAI 2025): LLaMA's blocks with attention sinks, alternating windows, and experts of a clamped gated unit.

An expert is act(gate) * (up + 1) with biases, gate clamped from above and up on both sides, where act is
x sigmoid(alpha x). The router's logits have a bias; its weights are a softmax over the chosen ones.
"""

from typing import Any

import torch

from xscale.convert.hf.architecture import Requirements
from xscale.convert.hf.mxfp4 import METHOD
from xscale.convert.hf.tables.decoders import AUX_LOSS, CORE, WindowKey, experts, windows_by_layer
from xscale.convert.hf.tables.keys import Renamed, SameKey, merged
from xscale.convert.hf.tables.tensors import Moved
from xscale.convert.hf.types.llama import BIAS, MISTRAL, layers
from xscale.convert.mapping import TRANSPOSED_EXPERTS, Tensors, Transform

ALPHAS = {1.702: "quick_geglu", 1.0: "swiglu"}
"""Alpha of an activation x sigmoid(alpha x) -> the kind of the gate."""
SINKS = {**CORE, "sinks": True}


def _interleave(tensors: Tensors) -> Tensors:
    return [torch.stack(tensors, -1).flatten(-2)]


INTERLEAVED = Transform(_interleave, lambda tensors: [tensors[0][..., ::2], tensors[0][..., 1::2]])
"""Biases of the experts' gate and up projection [E, F] -> one [E, 2 * F], in turns."""
INTERLEAVED_TRANSPOSED = Transform(
    lambda tensors: _interleave([tensor.mT for tensor in tensors]),
    lambda tensors: [tensors[0][..., ::2].mT, tensors[0][..., 1::2].mT],
)
"""The experts' gate and up projection [E, F, D] -> one [E, D, 2 * F], columns in turns."""


def _clamps(config: Any, require: Requirements) -> None:
    ffns = [config.stack.block_config(layer).ffn for layer in range(config.stack.depth)]
    if any(getattr(ffn, "expert", ffn).clamp_value is None for ffn in ffns):
        what = "gpt_oss clamps, and there is no clamp"
        require.reject("model.stack.block.ffn.expert.clamp_value", what, "7 would map.")


GPT_OSS = MISTRAL.variant(
    "gpt_oss",
    "GptOssForCausalLM",
    block={
        "mixer": {**BIAS, "core": windows_by_layer(SINKS, WindowKey(SINKS, some=True))},
        "ffn": merged(
            experts("num_local_experts", "intermediate_size"),
            {
                "router": {"normalise": True, "logit_bias": True},
                "expert": {
                    "gate": Renamed("swiglu_alpha", ALPHAS),
                    "bias": True,
                    "clamp_value": SameKey("swiglu_limit"),
                    "linear_offset": 1.0,
                },
            },
        ),
    },
    tensors=layers(
        {
            "mixer.part.core.sinks": "self_attn.sinks",
            "ffn.part.router.weight": "mlp.router.weight",
            "ffn.part.router.logit_bias": "mlp.router.bias",
            "ffn.part.experts.gate ffn.part.experts.up": Moved(
                "mlp.experts.gate_up_proj", INTERLEAVED_TRANSPOSED
            ),
            "ffn.part.experts.gate_bias ffn.part.experts.up_bias": Moved(
                "mlp.experts.gate_up_proj_bias", INTERLEAVED
            ),
            "ffn.part.experts.down": Moved("mlp.experts.down_proj", TRANSPOSED_EXPERTS),
            "ffn.part.experts.down_bias": "mlp.experts.down_proj_bias",
        }
    ),
    checks=(_clamps,),
    notes=(AUX_LOSS,),
    quantization=(METHOD,),
)
