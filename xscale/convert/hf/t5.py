"""T5 (Raffel et al. 2020; v1.1: Shazeer 2020) and Switch Transformer (Fedus et al. 2021): encoder-decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xscale.convert.hf.architecture import (
    ACTIVATIONS,
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    activation_of,
    uniform_block,
)
from xscale.convert.hf.keys import Keys, keys_from_hf, keys_to_hf
from xscale.convert.hf.switch import (
    CAPACITY,
    SPARSE_NOTES,
    STACKS,
    dropless,
    sparse_rule,
    sparse_to_hf,
)
from xscale.convert.mapping import (
    DUPLICATED,
    IDENTITY,
    UNSTACKED,
    Transform,
    WeightMapping,
    per_block,
    scaled,
    weight,
    zeros,
)
from xscale.core.errors import ConfigError
from xscale.nn.ffn.ffn import GATES, gated_hidden

KEYS: Keys = {
    "d_model": "width",
    "num_layers": "encoder.depth",
    "num_decoder_layers": "decoder.depth",
    "num_heads": ("encoder.block.mixer.heads", "decoder.block.mixer.heads"),
    "layer_norm_epsilon": ("encoder.block.norm.eps", "decoder.block.norm.eps"),
    "dropout_rate": (
        *[f"{stack}.block.{key}" for stack in STACKS for key in ("dropout", "mixer.dropout")],
        "dropout",
    ),
}
"""Keys with the same value, in both directions."""
GATED = {
    "geglu": "gated-gelu_python",
    "geglu_tanh": "gated-gelu_new",
    "reglu": "gated-relu",
    "swiglu": "gated-silu",
}
"""Gates: name in xscale -> `feed_forward_proj` of transformers."""
DROPOUT = "dropout: transformers also drops the ffn's hidden units and the last norm's output, and xscale does not"


@dataclass(frozen=True)
class T5Family:
    """T5 and Switch Transformer: what differs between them."""

    name: str
    loader: str
    sparse: bool
    ffn: str
    """Name of a block's dense ffn module."""

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        require.one_of("model.position", config.position.kind, "relative", "none")
        require.one_of("model.embedding_norm", config.embedding_norm, None)
        if self.sparse:
            # An untied head unties the library's three embedding tables too.
            require.one_of("model.tied", config.tied, True)
        blocks = {}
        for stack in STACKS:
            path = f"model.{stack}"
            blocks[stack] = self._block(getattr(config, stack), require, path)
        encoder, decoder = blocks["encoder"], blocks["decoder"]
        if require.problems:
            return {}
        for key in ("heads", "head_width"):
            require.one_of(
                f"model.decoder.block.mixer.{key}",
                getattr(decoder.mixer, key),
                getattr(encoder.mixer, key),
            )
        require.one_of("model.decoder.block.norm", decoder.norm, encoder.norm)
        require.one_of("model.decoder.block.ffn", decoder.ffn, encoder.ffn)
        if require.problems:
            return {}
        mixer, ffn = encoder.mixer, encoder.ffn
        none = config.position.kind == "none"
        data: Data = keys_to_hf(KEYS, config) | {
            "vocab_size": sizes.vocabulary,
            "d_kv": mixer.head_width or config.width // mixer.heads,
            "relative_attention_num_buckets": 32 if none else config.position.buckets,
            "relative_attention_max_distance": 128 if none else config.position.distance,
            "tie_word_embeddings": self._scales_head(config),
            "is_encoder_decoder": True,
            "decoder_start_token_id": sizes.pad,
            "d_ff": (gated_hidden if ffn.kind == "gated" else _dense_hidden)(
                ffn.hidden, config.width
            ),
        }
        return data | (
            sparse_to_hf(config, ffn, require) if self.sparse else {"feed_forward_proj": _feed(ffn)}
        )

    def _block(self, stack: Any, require: Requirements, path: str) -> Any:
        block = stack.block if self.sparse else uniform_block(stack, require, path)
        path = f"{path}.block"
        require.one_of(f"{path}.residual", block.residual.kind, "pre")
        require.one_of(f"{path}.norm", block.norm.kind, "rms")
        require.one_of(f"{path}.cross", block.cross, None, block.mixer)
        require.one_of(f"{path}.ffn", block.ffn.kind, "dense", *([] if self.sparse else ["gated"]))
        mixer = block.mixer
        if not require.one_of(f"{path}.mixer", mixer.kind, "attention"):
            return block
        require.one_of(f"{path}.mixer.core", mixer.core.kind, "softmax")
        require.one_of(f"{path}.mixer.kv_heads", mixer.kv_heads, None, mixer.heads)
        require.one_of(f"{path}.mixer.shared_qk", mixer.shared_qk or False, False)
        require.one_of(f"{path}.mixer.qk_norm", mixer.qk_norm, None)
        require.one_of(f"{path}.mixer.bias", mixer.bias, False)
        require.one_of(f"{path}.mixer.output_bias", mixer.output_bias, None, False)
        if block.ffn.kind == "dense":
            require.one_of(f"{path}.ffn.bias", block.ffn.bias, False)
            require.one_of(f"{path}.ffn.activation", block.ffn.activation, *ACTIVATIONS)
        if block.ffn.kind == "gated":
            require.one_of(f"{path}.ffn.bias", block.ffn.bias, False)
            require.one_of(f"{path}.ffn.gate", block.ffn.gate, *GATED)
        return block

    def from_hf(self, data: Data, require: Requirements) -> Data:
        # T5 does not divide scores by sqrt(head width).
        mixer = {"kind": "attention", "head_width": data["d_kv"], "scale": 1.0}
        block = {"mixer": mixer, "norm": {"kind": "rms"}, "residual": "pre"}
        if self.sparse:
            require.one_of("tie_word_embeddings", data["tie_word_embeddings"], True)
            require.one_of("router_bias", data["router_bias"], False)
            act = activation_of(data["dense_act_fn"], require, "dense_act_fn")
            ffn: Data = {"kind": "dense", "hidden": data["d_ff"], "activation": act}
        else:
            ffn = {"hidden": data["d_ff"], **_our_feed(data, require)}
        position = {
            "kind": "relative",
            "buckets": data["relative_attention_num_buckets"],
            "distance": data["relative_attention_max_distance"],
            "shared": True,
        }
        depths = {"encoder": data["num_layers"], "decoder": data["num_decoder_layers"]}
        tied = bool(data.get("scale_decoder_outputs", data.get("tie_word_embeddings", True)))
        section: Data = {
            "kind": "encoder_decoder",
            "position": position,
            "tied": tied,
            "scale_head": tied,
        }
        for stack, depth in depths.items():
            section[stack] = {"block": {**block, "ffn": ffn}}
            if self.sparse:
                section[stack]["rules"] = (
                    sparse_rule(data, depth, data[f"num_sparse_{stack}_layers"], ffn),
                )
        return keys_from_hf(KEYS, data, section)

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        width = config.width
        mixer = config.encoder.block.mixer
        mappings = [weight("source.table.weight", "shared.weight")]
        if config.tied and not self._scales_head(config):
            # Before version 5 the library does not tie a head whose input it does not scale.
            mappings = [weight("source.table.weight", "shared.weight lm_head.weight", DUPLICATED)]
        for stack in STACKS:
            blocks = getattr(config, stack)
            has_cross = stack == "decoder"
            mixer = blocks.block.mixer
            # Theirs has no factor of the scores.
            query_scale = _factor(mixer.scale or (mixer.head_width or width // mixer.heads) ** -0.5)
            last = IDENTITY
            if has_cross and config.scale_head != self._scales_head(config):
                last = _factor(width**-0.5 if config.scale_head else width**0.5)
            mappings.append(
                weight(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight", last)
            )
            for layer in range(blocks.depth):
                block = [*_attention("mixer", "layer.0", "SelfAttention", query_scale)]
                if has_cross:
                    block += _attention("cross", "layer.1", "EncDecAttention", query_scale)
                block += self._feed_forward(blocks.block_config(layer).ffn, 2 if has_cross else 1)
                named = [
                    weight(
                        " ".join(f"{stack}.blocks.{{i}}.{name}" for name in mapping.xscale_names),
                        " ".join(f"{stack}.block.{{i}}.{name}" for name in mapping.external_names),
                        mapping.transform,
                    )
                    for mapping in block
                ]
                mappings += per_block(1, named, layer)
            table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            if config.position.kind == "none":
                mappings.append(weight("", table, zeros(32, mixer.heads)))
            elif config.position.shared:
                mappings.append(weight(f"{stack}.position.weight", table))
            else:
                tables = " ".join(
                    f"{stack}.blocks.{layer}.mixer.part.position.weight"
                    for layer in range(blocks.depth)
                )
                mappings.append(weight(tables, table, shared(blocks.depth)))
        if not config.tied:
            mappings.append(weight("head.weight", "lm_head.weight"))
        return mappings

    def _scales_head(self, config: Any) -> bool:
        """Return whether theirs divides the head's input by sqrt(width): with config.json's `tie_word_embeddings`."""
        return self.sparse or (config.tied and config.scale_head)

    def _feed_forward(self, ffn: Any, sublayer: int) -> list[WeightMapping]:
        layer = f"layer.{sublayer}"
        mappings = [weight("ffn.norm.weight", f"{layer}.layer_norm.weight")]
        if ffn.kind == "moe":
            mlp = f"{layer}.mlp"
            mappings.append(weight("ffn.part.router.weight", f"{mlp}.router.classifier.weight"))
            for projection, name in (("up", "wi"), ("down", "wo")):
                names = [
                    f"{mlp}.experts.expert_{expert}.{name}.weight" for expert in range(ffn.experts)
                ]
                mappings.append(
                    weight(f"ffn.part.experts.{projection}", " ".join(names), UNSTACKED)
                )
            return mappings
        pairs = [("up", "wi"), ("down", "wo")]
        if ffn.kind == "gated":
            pairs = [("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")]
        dense = f"{layer}.{self.ffn}"
        return [
            *mappings,
            *(
                weight(f"ffn.part.{projection}.weight", f"{dense}.{name}.weight")
                for projection, name in pairs
            ),
        ]

    def architecture(self) -> Architecture:
        return Architecture(
            name=self.name,
            kind="encoder_decoder",
            loader=self.loader,
            to_hf=self.to_hf,
            from_hf=self.from_hf,
            weights=self.weights,
            ignored=(r"(encoder|decoder)\.embed_tokens\.weight",),
            with_tensors=_tied_by_value,
            keeps_z_loss=self.sparse,
            fallbacks=(("lm_head.weight", "shared.weight"),),
            features=frozenset({"block.mixer.scale"}),
            notes=(DROPOUT, *(SPARSE_NOTES if self.sparse else ())),
            without_capacity=dropless if self.sparse else lambda config: config,
            overrides={"expert_capacity": CAPACITY} if self.sparse else {},
        )


def shared(depth: int) -> Transform:
    """Transform one table per block to one table shared by all blocks."""

    def out(tables: list[Tensor]) -> list[Tensor]:
        if any(not torch.equal(table, tables[0]) for table in tables):
            what = "the relative-position tables differ between blocks, but T5 shares one table"
            raise ConfigError(
                "model.position",
                what,
                "A model trained with position.shared=true would map, or 'none'.",
            )
        return tables[:1]

    return Transform(out, lambda tensors: [tensors[0].clone() for _ in range(depth)])


def _tied_by_value(section: Data, tensor: Callable[[str], Tensor | None]) -> Data:
    """Tie the head of T5 v1.1 if the file has none, or the table's copy, as the library does; its input is unscaled."""
    head, table = tensor("lm_head.weight"), tensor("shared.weight")
    return section | {"tied": head is None or (table is not None and torch.equal(head, table))}


def _factor(factor: float) -> Transform:
    return IDENTITY if factor == 1 else scaled(factor)


def _attention(
    sublayer: str, hf_sublayer: str, name: str, query_scale: Transform
) -> list[WeightMapping]:
    mappings = [weight(f"{sublayer}.norm.weight", f"{hf_sublayer}.layer_norm.weight")]
    mappings.append(
        weight(f"{sublayer}.part.q.weight", f"{hf_sublayer}.{name}.q.weight", query_scale)
    )
    return mappings + [
        weight(f"{sublayer}.part.{part}.weight", f"{hf_sublayer}.{name}.{part}.weight")
        for part in "kvo"
    ]


def _dense_hidden(hidden: int | None, width: int) -> int:
    return hidden or 4 * width


def _feed(ffn: Any) -> str:
    return GATED[ffn.gate] if ffn.kind == "gated" else ACTIVATIONS[ffn.activation]


def _our_feed(data: Data, require: Requirements) -> Data:
    name = data["dense_act_fn"]
    if not data["is_gated_act"]:
        return {"kind": "dense", "activation": activation_of(name, require, "feed_forward_proj")}
    gates = {"gelu": "geglu", "gelu_python": "geglu", "relu": "reglu", "silu": "swiglu"}
    gates |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "geglu_tanh")
    assert set(gates.values()) <= set(GATES)
    require.one_of("feed_forward_proj", name, *gates)
    return {"kind": "gated", "gate": gates.get(name, "geglu")}


T5 = T5Family("t5", "T5ForConditionalGeneration", False, "DenseReluDense").architecture()
SWITCH = T5Family(
    "switch_transformers", "SwitchTransformersForConditionalGeneration", True, "mlp"
).architecture()
