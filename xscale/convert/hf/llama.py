"""LLaMA (Touvron et al. 2023) and its variants: Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Phi-3, OLMo 2 and OLMoE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xscale.convert.hf.architecture import Architecture, Data, ModelSizes, Requirements
from xscale.convert.hf.keys import Keys, keys_from_hf, keys_to_hf
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
from xscale.convert.mapping import (
    GATE_UP,
    IDENTITY,
    UNSTACKED,
    Transform,
    WeightMapping,
    concatenated,
    per_block,
    weight,
    with_biases,
)
from xscale.nn.ffn.ffn import gated_hidden

BLOCK = "model.stack.block"
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

KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "rms_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys of a model with the same value, in both directions."""
AUX_LOSS = (
    "router_aux_loss_coef: xscale's weight is the coefficient times top_k / layers, for the same pull on an even load; "
    "transformers' loss pools the layers and counts each of the top_k choices, and xscale's is the sum of the layers' "
    "losses, with fractions that sum to 1"
)


@dataclass(frozen=True)
class LlamaFamily:
    """LLaMA and its variants: what differs between them."""

    name: str
    loader: str
    bias: Literal["none", "optional", "inputs"] = "none"
    """Biases of the projections: none, optional (config.json says), inputs (q, k and v, always)."""
    ffn_bias: bool = False
    qk_norm: Literal["", "head", "heads"] = ""
    """Norm of queries and keys: none, over each head, over all heads."""
    residual: Literal["pre", "res_post", "sandwich"] = "pre"
    windows: Literal["", "all", "layers"] = ""
    """Sliding windows: none, of all layers, of the layers that `layer_types` names."""
    experts: str = ""
    """Name of a block's MoE module; empty: no MoE."""
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    dense_layers: bool = False
    """Whether some layers of a mixture may be dense."""
    fused: bool = False
    """Whether q, k and v are one tensor, and so are gate and up; then residual dropout is in config.json too, rotation
    may be partial, and its frequencies are not scaled."""
    divides: bool = False
    """Whether the library reads the head width as width / heads, and no other."""
    gate: str = "swiglu"
    activations: tuple[str, ...] = ("silu", "swish")
    """Names of the gate's activation, under `activation_key`."""
    activation_key: str = "hidden_act"
    gain: Transform = IDENTITY
    """Transform of the gain of a norm."""
    features: tuple[str, ...] = ()
    """Keys of `FEATURES` that the architecture has, besides those that follow from the other fields."""

    @property
    def keys(self) -> Keys:
        """Keys of a model with the same value, in both directions."""
        return KEYS | (
            {"resid_pdrop": "stack.block.dropout", "embd_pdrop": "dropout"} if self.fused else {}
        )

    @property
    def mixer_keys(self) -> Keys:
        """Keys of a mixer with the same value, in both directions."""
        keys = {"num_attention_heads": "heads", "attention_dropout": "dropout"}
        return keys | ({"attention_bias": "bias"} if self.bias == "optional" else {})

    @property
    def router_keys(self) -> Keys:
        """Keys of a router with the same value, in both directions."""
        return {"num_experts_per_tok": "top_k"} | (
            {} if self.name == "mixtral" else {"norm_topk_prob": "normalise"}
        )

    @property
    def varying(self) -> tuple[str, ...]:
        """Keys of a block in which layers may differ."""
        return (*(["mixer.core"] if self.windows else []), *(["ffn"] if self.dense_layers else []))

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
