"""Names of the tensors of LLaMA and its variants, in xscale and in `transformers`."""

from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.llama_variant import LlamaVariant
from xscale.convert.mapping import (
    GATE_UP,
    UNSTACKED,
    WeightMapping,
    concatenated,
    per_block,
    weight,
    with_biases,
)

MIXER = "stack.blocks.{i}.mixer"
FFN = "stack.blocks.{i}.ffn"
LAYER = "model.layers.{i}"
NORMS = {
    "pre": {f"{MIXER}.norm": "input_layernorm", f"{FFN}.norm": "post_attention_layernorm"},
    "res_post": {
        f"{MIXER}.norm": "post_attention_layernorm",
        f"{FFN}.norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        f"{MIXER}.norm": "input_layernorm",
        f"{MIXER}.after": "post_attention_layernorm",
        f"{FFN}.norm": "pre_feedforward_layernorm",
        f"{FFN}.after": "post_feedforward_layernorm",
    },
}
"""Placement -> name of each norm in xscale and in transformers."""


@dataclass(frozen=True)
class LlamaWeights(LlamaVariant):
    """The tensors of a variant."""

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        outer = [
            weight("embed.table.weight", "model.embed_tokens.weight"),
            weight("stack.norm.weight", "model.norm.weight", self.gain),
        ]
        if not config.tied:
            outer.append(weight("head.weight", "lm_head.weight"))
        for layer in range(config.stack.depth):
            block = config.stack.block_config(layer)
            outer += per_block(
                1,
                self._mixer_weights(config, block.mixer) + self._ffn_weights(block.ffn),
                first=layer,
            )
        return outer

    def _mixer_weights(self, config: Any, mixer: Any) -> list[WeightMapping]:
        """Map the mixer and the norms of a block."""
        attention = f"{LAYER}.self_attn"
        layer = [
            weight(f"{xscale_name}.weight", f"{LAYER}.{hf_name}.weight", self.gain)
            for xscale_name, hf_name in NORMS[self.residual].items()
        ]
        if self.fused:
            head_width = mixer.head_width or config.width // mixer.heads
            queries, keys = mixer.heads * head_width, (mixer.kv_heads or mixer.heads) * head_width
            names = " ".join(f"{MIXER}.part.{part}.weight" for part in "qkv")
            layer.append(
                weight(names, f"{attention}.qkv_proj.weight", concatenated(queries, keys, keys))
            )
        else:
            inputs = [
                weight(f"{MIXER}.part.{part}.weight", f"{attention}.{part}_proj.weight")
                for part in "qkv"
            ]
            layer += with_biases(inputs, mixer.bias)
        output = [weight(f"{MIXER}.part.o.weight", f"{attention}.o_proj.weight")]
        layer += with_biases(output, mixer.bias if mixer.output_bias is None else mixer.output_bias)
        for part in "qk" if self.qk_norm else "":
            layer.append(
                weight(
                    f"{MIXER}.part.{part}_norm.weight", f"{attention}.{part}_norm.weight", self.gain
                )
            )
        return layer

    def _ffn_weights(self, ffn: Any) -> list[WeightMapping]:
        projections, mlp = ("gate", "up", "down"), f"{LAYER}.mlp"
        if ffn.kind == "moe":
            moe = f"{LAYER}.{self.experts}"
            layer = [weight(f"{FFN}.part.router.weight", f"{moe}.{self.router}.weight")]
            for projection, hf_name in zip(projections, self.parts, strict=True):
                names = " ".join(
                    f"{moe}.experts.{expert}.{hf_name}.weight" for expert in range(ffn.experts)
                )
                layer.append(weight(f"{FFN}.part.experts.{projection}", names, UNSTACKED))
            return layer
        if self.fused:
            both = f"{FFN}.part.gate.weight {FFN}.part.up.weight"
            down = weight(f"{FFN}.part.down.weight", f"{mlp}.down_proj.weight")
            return [weight(both, f"{mlp}.gate_up_proj.weight", GATE_UP), down]
        dense = [
            weight(f"{FFN}.part.{part}.weight", f"{mlp}.{part}_proj.weight") for part in projections
        ]
        return with_biases(dense, ffn.bias)
