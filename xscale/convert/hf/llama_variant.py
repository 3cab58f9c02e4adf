"""Differences between LLaMA and its variants in `transformers`: biases, norms, windows, experts and names."""

from dataclasses import dataclass
from typing import Literal

from xscale.convert.hf.keys import Keys
from xscale.convert.mapping import (
    IDENTITY,
    Transform,
)

BLOCK = "model.stack.block"

KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "rms_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys of a model with the same value, in both directions."""


@dataclass(frozen=True)
class LlamaVariant:
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
