"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and BigBird (Zaheer et al. 2020) with full attention.

Masked language models with post-norm blocks.
"""

from dataclasses import dataclass
from typing import Any

from xscale.convert.hf.architecture import (
    ACTIVATIONS,
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    SentenceHeadLayout,
    activation_of,
    classic_block,
)
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.mapping import (
    DUPLICATED,
    WeightMapping,
    per_block,
    positions_and_types,
    rows_before,
    weight,
    with_biases,
)

KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "stack.depth",
    "num_attention_heads": "stack.block.mixer.heads",
    "attention_probs_dropout_prob": "stack.block.mixer.dropout",
    "hidden_dropout_prob": "stack.block.dropout",
    "layer_norm_eps": "stack.block.norm.eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
"""Keys with the same value, in both directions."""
TYPES = "token types: every token has the first type, unless an objective on sentences told others"


@dataclass(frozen=True)
class BertFamily:
    """BERT and its variants: what differs between them."""

    name: str
    """`model_type`."""
    body: str
    """Prefix of the tensors of the model without its head."""
    loader: str
    first: int
    """Unused rows of the position table before position 0, besides the padding id; 0: none."""
    dense: str
    norm: str
    bias: str
    types: int
    """Rows of the token-type table that an export writes for a model without one."""
    notes: tuple[str, ...] = ()
    sentence_head: SentenceHeadLayout | None = None

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        block = classic_block(config, "post", require)
        require.one_of(
            "model.embedding_norm", getattr(config.embedding_norm, "kind", None), "layer"
        )
        if block is None or config.embedding_norm is None:
            return {}
        require.one_of("model.embedding_norm", config.embedding_norm, block.norm)
        ffn = block.ffn
        SentenceHeadLayout.require(config, require)
        require.one_of("model.head_bias", config.head_bias, True)
        require.one_of("model.global_tokens", config.global_tokens, 0)
        require.one_of(
            "model.transform", config.transform, "gelu" if self.first else ffn.activation
        )
        return keys_to_hf(KEYS, config) | {
            "vocab_size": sizes.vocabulary,
            "intermediate_size": ffn.hidden or 4 * config.width,
            "hidden_act": ACTIVATIONS.get(ffn.activation),
            "max_position_embeddings": (config.position.length or sizes.length)
            + self._before(sizes.pad),
            "type_vocab_size": config.token_types or self.types,
        }

    def _before(self, pad: int) -> int:
        return pad + self.first if self.first else 0

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of(
            "position_embedding_type", data.get("position_embedding_type") or "absolute", "absolute"
        )
        require.one_of("is_decoder", data.get("is_decoder", False), False)
        if self.first:
            require.one_of("pad_token_id", data["pad_token_id"], 0, 1)
        act = activation_of(data["hidden_act"], require, "hidden_act")
        norm = {"kind": "layer", "eps": data["layer_norm_eps"]}
        ffn = {
            "kind": "dense",
            "hidden": data["intermediate_size"],
            "activation": act,
            "bias": True,
        }
        length = data["max_position_embeddings"] - self._before(data["pad_token_id"] or 0)
        block = {
            "mixer": {"kind": "attention", "bias": True},
            "ffn": ffn,
            "norm": norm,
            "residual": "post",
        }
        section = {
            "kind": "encoder",
            "position": {"kind": "learned", "length": length},
            "dropout": float(data["hidden_dropout_prob"]),
            "embedding_norm": norm,
            "token_types": data["type_vocab_size"],
            "transform": "gelu" if self.first else act,
            "head_bias": True,
            "stack": {"block": block},
        }
        return keys_from_hf(KEYS, data, section)

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        block, body = "stack.blocks.{i}", self.body
        hf_layer = f"{body}.encoder.layer.{{i}}"
        layer = [
            weight(f"{block}.mixer.part.{part}.weight", f"{hf_layer}.attention.self.{name}.weight")
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"))
        ]
        layer += [
            weight(f"{block}.mixer.part.o.weight", f"{hf_layer}.attention.output.dense.weight"),
            weight(f"{block}.mixer.norm.weight", f"{hf_layer}.attention.output.LayerNorm.weight"),
            weight(f"{block}.ffn.part.up.weight", f"{hf_layer}.intermediate.dense.weight"),
            weight(f"{block}.ffn.part.down.weight", f"{hf_layer}.output.dense.weight"),
            weight(f"{block}.ffn.norm.weight", f"{hf_layer}.output.LayerNorm.weight"),
        ]
        embeddings, before = f"{body}.embeddings", self._before(sizes.pad)
        positions, types = (
            f"{embeddings}.position_embeddings.weight",
            f"{embeddings}.token_type_embeddings.weight",
        )
        tables = [
            weight(
                "embed.position.weight",
                f"{positions} {types}",
                positions_and_types(before, self.types),
            )
        ]
        if config.token_types:
            tables = [
                weight("embed.position.weight", positions, rows_before(before)),
                weight("embed.types", types),
            ]
        outer = [
            weight("embed.table.weight", f"{embeddings}.word_embeddings.weight"),
            *tables,
            *with_biases([weight("embed.norm.weight", f"{embeddings}.LayerNorm.weight")], True),
            *with_biases([weight("head.transform.dense.weight", f"{self.dense}.weight")], True),
            *with_biases([weight("head.transform.norm.weight", f"{self.norm}.weight")], True),
        ]
        if config.tied:
            outer.append(weight("head.bias", self.bias))
        else:
            # The library ties the two biases if, and only if, it ties the weights; it adds the decoder's.
            decoder = f"{self.bias.rpartition('.')[0]}.decoder"
            outer.append(weight("head.weight", f"{decoder}.weight"))
            outer.append(weight("head.bias", f"{decoder}.bias {self.bias}", DUPLICATED))
        if config.sentence_head is not None and self.sentence_head is not None:
            outer += self.sentence_head.weights()
        return [*outer, *per_block(config.stack.depth, with_biases(layer, True))]

    def architecture(self) -> Architecture:
        return Architecture(
            name=self.name,
            kind="encoder",
            loader=self.loader,
            to_hf=self.to_hf,
            from_hf=self.from_hf,
            weights=self.weights,
            ignored=(
                r".*\.position_ids",
                r".*\.pooler\..*",
                r"cls\.seq_relationship\..*",
                r"(cls\.predictions|lm_head)\.decoder\.(bias|weight)",
            ),
            notes=(TYPES, *self.notes),
            features=frozenset({"sentence_head"} if self.sentence_head else ()),
            sentence_head=self.sentence_head,
        )


HEAD = (
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.bias",
)
"""Tensors of BERT's language-model head."""
NEXT_SENTENCE = SentenceHeadLayout(
    "BertForPreTraining", "bert.pooler.dense", "cls.seq_relationship", "seq_relationship_logits"
)
BERT = BertFamily(
    "bert", "bert", "BertForMaskedLM", 0, *HEAD, 2, sentence_head=NEXT_SENTENCE
).architecture()
ROBERTA_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
ROBERTA = BertFamily("roberta", "roberta", "RobertaForMaskedLM", 1, *ROBERTA_HEAD, 1).architecture()


FULL = "original_full"


class BigBirdFamily(BertFamily):
    """BigBird. Its sparse attention cannot be mapped: in training the library draws random blocks in each call, and in
    evaluation it replaces each random block by the first one, which is then counted several times."""

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        data = super().to_hf(config, sizes, require)
        return data and data | {
            "attention_type": FULL,
            "use_bias": True,
            "rescale_embeddings": False,
        }

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of("use_bias", data["use_bias"], True)
        require.one_of("rescale_embeddings", data["rescale_embeddings"], False)
        # Up to this many tokens the library itself uses full attention.
        full = (5 + 2 * data["num_random_blocks"]) * data["block_size"]
        if data["attention_type"] != FULL and data["max_position_embeddings"] > full:
            what = (
                f"{data['attention_type']} has no counterpart beyond {full} tokens: in evaluation the first block "
                f"replaces each of the {data['num_random_blocks']} random blocks and is counted several times"
            )
            fix = f"Set it to {FULL}: the weights fit both, and the model then attends to every token."
            require.reject("attention_type", what, fix)
        return super().from_hf(data, require)


BIG_BIRD = BigBirdFamily(
    "big_bird",
    "bert",
    "BigBirdForMaskedLM",
    0,
    *HEAD,
    2,
    (
        "embedding dropout: transformers applies it before the embedding norm, xscale after it",
        "pooler: xscale has none; transformers initialises one, which masked language modelling does not use",
    ),
).architecture()
