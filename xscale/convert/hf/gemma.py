"""Gemma 2 (Gemma team 2024) and Gemma 3 (2025), its text models: LLaMA's blocks with four norms, caps and windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xscale.convert.hf.architecture import Data, ModelSizes, Requirements
from xscale.convert.hf.keys import Keys
from xscale.convert.hf.layers import core_of, rope_from_hf, rope_to_hf
from xscale.convert.hf.llama import LlamaFamily
from xscale.convert.hf.llama_variant import BLOCK
from xscale.convert.mapping import shifted

GLOBAL, LOCAL = "full_attention", "sliding_attention"
ONE_PLUS = shifted(1.0)
"""The library multiplies by 1 + weight."""


@dataclass(frozen=True)
class GemmaFamily(LlamaFamily):
    """Gemma 2 and 3: what differs between them, besides LLaMA's fields."""

    caps: bool = False
    """Whether attention scores are capped."""
    two_bases: bool = False
    """Whether layers with a window have a position encoding of their own."""

    @property
    def keys(self) -> Keys:
        return {**super().keys, "final_logit_softcapping": "logit_soft_cap"}

    @property
    def varying(self) -> tuple[str, ...]:
        return (*super().varying, *(["mixer.position"] if self.two_bases else []))

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        data = super().to_hf(config, sizes, require)
        if not data:
            return {}
        require.one_of("model.scale_embeddings", config.scale_embeddings, True)
        mixer = config.stack.block_config(0).mixer
        scalar = (mixer.scale or data["head_dim"] ** -0.5) ** -2
        if abs(scalar - round(scalar)) > 1e-6 * scalar:
            what = f"{mixer.scale} is 1 / sqrt({scalar:.6g})"
            require.reject(f"{BLOCK}.mixer.scale", what, "1 / sqrt of a whole number would map.")
        return data | {"query_pre_attn_scalar": round(scalar), "use_bidirectional_attention": False}

    def _position(self, config: Any, blocks: Sequence[Any], require: Requirements) -> Data:
        data = super()._position(config, blocks, require)
        local = [block for block in blocks if block.mixer.core.kind != "softmax"]
        caps = {
            block.mixer.core.soft_cap for block in blocks if hasattr(block.mixer.core, "soft_cap")
        }
        if len(caps) > 1:
            what = f"{require.architecture} has the same cap in all layers"
            require.reject("model.stack.rules", what, "Cores with one soft_cap would map.")
        elif self.caps:
            data["attn_logit_softcapping"] = next(iter(caps), None)
        if not self.two_bases:
            return data
        positions = {
            LOCAL: [block.mixer.position or config.position for block in local],
            GLOBAL: [
                block.mixer.position or config.position for block in blocks if block not in local
            ],
        }
        del data["rope_theta"]
        data["rope_parameters"] = {
            kind: self._one_rope(kind_positions or [config.position], require)
            for kind, kind_positions in positions.items()
        }
        return data

    def _one_rope(self, positions: Sequence[Any], require: Requirements) -> Data:
        """Return the rope parameters of the layers of one kind."""
        if any(position != positions[0] for position in positions):
            what = (
                f"{require.architecture} has one position encoding with a window, and one without"
            )
            require.reject("model.stack.rules", what, "Equal positions in these layers would map.")
        path = f"{BLOCK}.mixer.position"
        if not require.one_of(path, positions[0].kind, "rope"):
            return {}
        require.one_of(f"{path}.fraction", positions[0].fraction, 1.0)
        scaling = positions[0].scaling
        require.one_of(
            f"{path}.scaling", None if scaling is None else scaling.method, None, *SCALINGS
        )
        return rope_to_hf(positions[0])

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of(
            "use_bidirectional_attention", bool(data.get("use_bidirectional_attention")), False
        )
        if not self.caps:
            require.one_of("attn_logit_softcapping", data.get("attn_logit_softcapping"), None)
        return super().from_hf(data, require) | {"scale_embeddings": True}

    def _our_position(self, data: Data, require: Requirements) -> Data:
        rope = data["rope_parameters"]
        return rope_from_hf(
            rope[GLOBAL] if self.two_bases else rope, data, require, methods=self._methods
        )

    def _our_mixer(
        self, data: Data, norm: Data, window: int | None, layer: int, require: Requirements
    ) -> Data:
        mixer = super()._our_mixer(data, norm, window, layer, require)
        cap = data.get("attn_logit_softcapping") if self.caps else None
        mixer |= {
            "core": core_of(window, cap),
            "scale": float(data["query_pre_attn_scalar"]) ** -0.5,
        }
        # A window that no text exceeds is none, and its layers are still those of the local base.
        if self.two_bases and data["layer_types"][layer] == LOCAL:
            rope = data["rope_parameters"][LOCAL]
            mixer["position"] = rope_from_hf(rope, data, require, methods=self._methods)
        return mixer

    @property
    def _methods(self) -> tuple[str, ...]:
        return SCALINGS if self.two_bases else ("linear", "dynamic", "llama3", "yarn")


SCALINGS = ("linear", "llama3", "yarn")
"""Scalings that may differ between layers: the library has one longest text for dynamic scaling."""
FEATURES = ("scale_embeddings", "logit_soft_cap", "block.mixer.scale")
_gemma = partial(
    GemmaFamily,
    bias="optional",
    residual="sandwich",
    windows="layers",
    gate="geglu_tanh",
    activations=("gelu_pytorch_tanh",),
    activation_key="hidden_activation",
    gain=ONE_PLUS,
)
GEMMA2 = _gemma(
    "gemma2", "Gemma2ForCausalLM", features=(*FEATURES, "block.mixer.core.soft_cap"), caps=True
).architecture()
GEMMA3 = _gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    qk_norm="head",
    features=(*FEATURES, "block.mixer.position"),
    two_bases=True,
).architecture()
