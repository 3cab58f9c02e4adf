"""LLaMA (Touvron et al. 2023) and its variants: Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Phi-3, OLMo 2 and OLMoE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import Architecture, Data, ModelSizes, Requirements
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.hf.layers import (
    core_of,
    dynamic_length,
    expert_count,
    hf_windows,
    is_sparse,
    layer_blocks,
    layer_rules,
    layer_types,
    longest_window,
    one_window,
    rope_from_hf,
    rope_to_hf,
    window_of_some,
    windows_of,
)
from xscale.convert.hf.llama_variant import BLOCK
from xscale.convert.hf.llama_weights import LlamaWeights
from xscale.nn.ffn.ffn import gated_hidden

AUX_LOSS = (
    "router_aux_loss_coef: xscale's weight is the coefficient times top_k / layers, for the same pull on an even load; "
    "transformers' loss pools the layers and counts each of the top_k choices, and xscale's is the sum of the layers' "
    "losses, with fractions that sum to 1"
)


@dataclass(frozen=True)
class LlamaFamily(LlamaWeights):
    """LLaMA and its variants: their configs, both ways, and their tensors."""

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        blocks = layer_blocks(config.stack, require, "model.stack", self.varying)
        block = blocks[0]
        require.one_of("model.position", config.position.kind, "rope")
        require.one_of(f"{BLOCK}.residual", block.residual.kind, self.residual)
        require.one_of(f"{BLOCK}.norm", block.norm.kind, "rms")
        require.one_of(f"{BLOCK}.mixer", block.mixer.kind, "attention")
        kinds = {layer.ffn.kind for layer in blocks}
        for kind in kinds - {"gated"} if self.dense_layers and "moe" in kinds else kinds:
            require.one_of(f"{BLOCK}.ffn", kind, "moe" if self.experts else "gated")
        if require.problems:
            return {}
        data: Data = keys_to_hf(self.keys, config) | {
            "vocab_size": sizes.vocabulary,
            "max_position_embeddings": sizes.length,
            self.activation_key: self.activations[0],
        }
        if self.fused:
            # The library's default is an id beyond small vocabularies.
            data["pad_token_id"] = sizes.pad
        data |= self._position(config, blocks, require)
        data |= self._attention(config, block, require)
        data |= self._windows(blocks, require)
        ffns = [layer.ffn for layer in blocks]
        return data | (self._mixture if self.experts else self._dense)(config, ffns, require)

    def _position(self, config: Any, blocks: Sequence[Any], require: Requirements) -> Data:
        position, block = config.position, blocks[0]
        rope = rope_to_hf(position)
        data: Data = {
            "rope_theta": position.base,
            "rope_parameters": rope,
            **dynamic_length(position),
        }
        if not self.fused:
            require.one_of("model.position.fraction", position.fraction, 1.0)
            return data
        head_width = block.mixer.head_width or config.width // block.mixer.heads
        if int(head_width * position.fraction) % 2:
            what = f"{position.fraction} of {head_width} channels is an odd number"
            require.reject(
                "model.position.fraction",
                what,
                "A fraction with an even number of channels would map.",
            )
        return data | {"rope_parameters": rope | {"partial_rotary_factor": position.fraction}}

    def _attention(self, config: Any, block: Any, require: Requirements) -> Data:
        mixer = block.mixer
        require.one_of(f"{BLOCK}.mixer.shared_qk", mixer.shared_qk or False, False)
        norm = None if mixer.qk_norm is None else mixer.qk_norm.kind
        if (
            require.one_of(f"{BLOCK}.mixer.qk_norm", norm, "rms" if self.qk_norm else None)
            and self.qk_norm
        ):
            require.one_of(f"{BLOCK}.mixer.qk_norm.eps", mixer.qk_norm.eps, block.norm.eps)
            require.one_of(f"{BLOCK}.mixer.qk_norm_over", mixer.qk_norm_over, self.qk_norm)
        out = mixer.bias if mixer.output_bias is None else mixer.output_bias
        if self.bias == "optional":
            require.one_of(f"{BLOCK}.mixer.output_bias", out, mixer.bias)
        else:
            require.one_of(f"{BLOCK}.mixer.bias", mixer.bias, self.bias == "inputs")
            require.one_of(f"{BLOCK}.mixer.output_bias", out, False)
        if mixer.head_width is None and config.width % mixer.heads:
            require.reject(
                f"{BLOCK}.mixer.heads", "they do not divide the width", "Give head_width."
            )
        head_width = mixer.head_width or config.width // mixer.heads
        data: Data = keys_to_hf(self.mixer_keys, mixer) | {
            "num_key_value_heads": mixer.kv_heads or mixer.heads,
            "head_dim": head_width,
        }
        if self.divides or self.name in ("llama", "mistral", "gemma2", "gemma3_text"):
            # The library reads or checks the head width as width / heads.
            fitting = [heads for heads in range(1, config.width + 1) if config.width % heads == 0]
            require.one_of(f"{BLOCK}.mixer.heads", mixer.heads, *fitting)
        if self.divides:
            require.one_of(f"{BLOCK}.mixer.head_width", head_width, config.width // mixer.heads)
        return data

    def _windows(self, blocks: Sequence[Any], require: Requirements) -> Data:
        if not self.windows:
            require.one_of(f"{BLOCK}.mixer.core", blocks[0].mixer.core.kind, "softmax")
            return {}
        windows = windows_of(blocks, require)
        if self.windows == "all":
            window = one_window(windows, require)
            switch = {"use_sliding_window": window is not None} if self.dense_layers else {}
            return {"sliding_window": window, **switch}
        window = window_of_some(windows, require)
        data: Data = {"layer_types": layer_types(windows)}
        # Gemma's mask needs a size even if no layer has it: without the key it is the library's default.
        data |= (
            {}
            if window is None and self.activation_key != "hidden_act"
            else {"sliding_window": window}
        )
        if self.activation_key == "hidden_act":
            # Readers that do not know `layer_types` count the first layers, which have no window.
            first = next(
                (layer for layer, size in enumerate(windows) if size is not None), len(windows)
            )
            data |= {"use_sliding_window": window is not None, "max_window_layers": first}
        return data

    def _dense(self, config: Any, ffns: Sequence[Any], require: Requirements) -> Data:
        ffn = ffns[0]
        require.one_of(f"{BLOCK}.ffn.gate", ffn.gate, self.gate)
        if not self.ffn_bias:
            require.one_of(f"{BLOCK}.ffn.bias", ffn.bias, False)
        data: Data = {"intermediate_size": gated_hidden(ffn.hidden, config.width)}
        return data | ({"mlp_bias": ffn.bias} if self.ffn_bias else {})

    def _mixture(self, config: Any, ffns: Sequence[Any], require: Requirements) -> Data:
        path = f"{BLOCK}.ffn"
        sparse, dense = (
            [ffn for ffn in ffns if (ffn.kind == "moe") == moe] for moe in (True, False)
        )
        if any(ffn != group[0] for group in (sparse, dense) for ffn in group):
            what = f"{require.architecture} has one kind of dense and one of sparse layers"
            require.reject(
                "model.stack.rules", what, "Equal experts in all sparse layers would map."
            )
        ffn = sparse[0]
        require.one_of(f"{path}.router", ffn.router.kind, "topk")
        require.one_of(f"{path}.expert", ffn.expert.kind, "gated")
        require.one_of(f"{path}.shared", None if ffn.shared is None else ffn.shared.kind, None)
        require.one_of(f"{path}.capacity_factor", ffn.capacity_factor, None)
        if require.problems:
            return {}
        require.one_of(f"{path}.expert.gate", ffn.expert.gate, "swiglu")
        require.one_of(f"{path}.expert.bias", ffn.expert.bias, False)
        require.one_of(f"{path}.router.score", ffn.router.score, "softmax")
        require.one_of(f"{path}.router.scale", ffn.router.scale, 1.0)
        require.one_of(f"{path}.router.bias_update_rate", ffn.router.bias_update_rate, 0.0)
        hidden = gated_hidden(ffn.expert.hidden, config.width)
        coefficient = ffn.router.aux_loss_weight * len(sparse) / ffn.router.top_k
        data: Data = keys_to_hf(self.router_keys, ffn.router) | {
            "router_aux_loss_coef": coefficient
        }
        if self.name == "mixtral":
            require.one_of(f"{path}.router.normalise", ffn.router.normalise, True)
            return data | {"num_local_experts": ffn.experts, "intermediate_size": hidden}
        data |= {"num_experts": ffn.experts, "intermediate_size": hidden}
        if self.dense_layers:
            layers = [layer for layer, layer_ffn in enumerate(ffns) if layer_ffn.kind != "moe"]
            data |= {
                "moe_intermediate_size": hidden,
                "decoder_sparse_step": 1,
                "mlp_only_layers": layers,
            }
            data |= self._dense(config, dense, require) if dense else {}
        return data

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of(self.activation_key, data[self.activation_key], *self.activations)
        if self.name == "olmoe":
            require.one_of("clip_qkv", data.get("clip_qkv"), None)
        if jitter := float(data.get("router_jitter_noise") or 0):
            what = (
                f"a jitter of {jitter:g} also multiplies what the experts read, "
                "and xscale's only what the router reads"
            )
            require.reject(
                "router_jitter_noise",
                what,
                "0 would map; model.stack.block.ffn.router.jitter is xscale's.",
            )
        norm = {"kind": "rms", "eps": data["rms_norm_eps"]}
        depth = data["num_hidden_layers"]
        windows = hf_windows(data, require) if self.windows else [None] * depth
        mixers = [
            self._our_mixer(data, norm, window, layer, require)
            for layer, window in enumerate(windows)
        ]
        ffns = [self._our_ffn(data, layer) for layer in range(depth)]
        block: Data = {"mixer": mixers[0], "ffn": ffns[0], "norm": norm, "residual": self.residual}
        section = {
            "kind": "decoder",
            "position": self._our_position(data, require),
            "dropout": 0.0,
            "stack": {
                "block": block,
                "rules": [*layer_rules(mixers, "mixer"), *layer_rules(ffns, "ffn")],
            },
        }
        return keys_from_hf(self.keys, data, section)

    def _our_position(self, data: Data, require: Requirements) -> Data:
        rope = data.get("rope_parameters") or {"rope_theta": data.get("rope_theta", 10000.0)}
        if self.fused:
            return rope_from_hf(rope, data, require, partial=True, methods=())
        return rope_from_hf(rope, data, require)

    def _our_mixer(
        self, data: Data, norm: Data, window: int | None, layer: int, require: Requirements
    ) -> Data:
        section = {
            "kind": "attention",
            "kv_heads": data["num_key_value_heads"] or data["num_attention_heads"],
            "head_width": data.get("head_dim"),
            "core": core_of(window),
            "bias": self.bias == "inputs",
            "output_bias": False if self.bias == "inputs" else None,
            "qk_norm": norm if self.qk_norm else None,
            "qk_norm_over": self.qk_norm or "head",
        }
        return keys_from_hf(self.mixer_keys, data, section)

    def _our_ffn(self, data: Data, layer: int) -> Data:
        if self.experts and (not self.dense_layers or is_sparse(data, layer)):
            return self._our_mixture(data)
        bias = self.ffn_bias and bool(data.get("mlp_bias"))
        return {
            "kind": "gated",
            "gate": self.gate,
            "hidden": data["intermediate_size"],
            "bias": bias,
        }

    def _our_mixture(self, data: Data) -> Data:
        layers = sum(
            not self.dense_layers or is_sparse(data, layer)
            for layer in range(data["num_hidden_layers"])
        )
        weight = float(data["router_aux_loss_coef"]) * data["num_experts_per_tok"] / layers
        router = {"kind": "topk", "normalise": True, "aux_loss_weight": weight}
        return {
            "kind": "moe",
            "experts": expert_count(data),
            "router": keys_from_hf(self.router_keys, data, router),
            "expert": {
                "kind": "gated",
                "gate": "swiglu",
                "hidden": data[
                    "moe_intermediate_size" if self.dense_layers else "intermediate_size"
                ],
            },
        }

    def architecture(self) -> Architecture:
        read = {*self.features, *(["block.mixer.qk_norm_over"] if self.qk_norm else [])}
        return Architecture(
            name=self.name,
            kind="decoder",
            loader=self.loader,
            to_hf=self.to_hf,
            from_hf=self.from_hf,
            weights=self.weights,
            ignored=(r".*rotary_emb\.inv_freq",),
            notes=(AUX_LOSS,) if self.experts else (),
            attention_span=longest_window,
            features=frozenset(read | (set() if self.fused else {"position.scaling"})),
        )


LLAMA = LlamaFamily("llama", "LlamaForCausalLM", bias="optional", ffn_bias=True).architecture()
MISTRAL = LlamaFamily("mistral", "MistralForCausalLM", windows="all").architecture()
QWEN2 = LlamaFamily(
    "qwen2", "Qwen2ForCausalLM", bias="inputs", windows="layers", divides=True
).architecture()
QWEN3 = LlamaFamily(
    "qwen3", "Qwen3ForCausalLM", bias="optional", qk_norm="head", windows="layers"
).architecture()
MIXTRAL = LlamaFamily(
    "mixtral",
    "MixtralForCausalLM",
    windows="all",
    experts="block_sparse_moe",
    parts=("w1", "w3", "w2"),
).architecture()
QWEN3_MOE = LlamaFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    bias="optional",
    qk_norm="head",
    windows="all",
    experts="mlp",
    dense_layers=True,
).architecture()
PHI3 = LlamaFamily(
    "phi3", "Phi3ForCausalLM", windows="all", fused=True, divides=True
).architecture()
OLMO2 = LlamaFamily(
    "olmo2", "Olmo2ForCausalLM", bias="optional", qk_norm="heads", residual="res_post", divides=True
).architecture()
OLMOE = LlamaFamily(
    "olmoe", "OlmoeForCausalLM", bias="optional", qk_norm="heads", experts="mlp", divides=True
).architecture()
