"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler, under names and keys of its own."""

from typing import Any

from xscale.convert.hf.architecture import ACTIVATIONS, Architecture, Data, ModelSizes, Requirements
from xscale.convert.hf.bert import BertFamily
from xscale.convert.mapping import WeightMapping, per_block, weight, with_biases

EPS = 1e-12
"""Epsilon of every norm; config.json has no key for it."""
KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Keys of BERT -> those of DistilBERT."""
BODY = "distilbert"


class DistilBertFamily(BertFamily):
    """DistilBERT: its blocks are those of BERT."""

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        require.one_of("model.token_types", config.token_types, 0)
        data = super().to_hf(config, sizes, require)
        if not data:
            return data
        require.one_of("model.stack.block.norm.eps", data.pop("layer_norm_eps"), EPS)
        del data["type_vocab_size"]
        return {KEYS.get(key, key): value for key, value in data.items()} | {
            "sinusoidal_pos_embds": False
        }

    def from_hf(self, data: Data, require: Requirements) -> Data:
        # They are a learned table here and frozen there.
        require.one_of("sinusoidal_pos_embds", data.get("sinusoidal_pos_embds", False), False)
        require.one_of("activation", data["activation"], *ACTIVATIONS.values())
        if require.problems:
            return {"position": {}}
        of_bert = {key: data[other] for key, other in KEYS.items()}
        return super().from_hf(
            data | of_bert | {"layer_norm_eps": EPS, "type_vocab_size": 0}, require
        )

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        block = "stack.blocks.{i}"
        hf_layer = f"{BODY}.transformer.layer.{{i}}"
        embeddings = f"{BODY}.embeddings"
        layer = [
            weight(f"{block}.mixer.part.{part}.weight", f"{hf_layer}.attention.{name}.weight")
            for part, name in (("q", "q_lin"), ("k", "k_lin"), ("v", "v_lin"), ("o", "out_lin"))
        ]
        layer += [
            weight(f"{block}.mixer.norm.weight", f"{hf_layer}.sa_layer_norm.weight"),
            weight(f"{block}.ffn.part.up.weight", f"{hf_layer}.ffn.lin1.weight"),
            weight(f"{block}.ffn.part.down.weight", f"{hf_layer}.ffn.lin2.weight"),
            weight(f"{block}.ffn.norm.weight", f"{hf_layer}.output_layer_norm.weight"),
        ]
        around = [
            weight("embed.norm.weight", f"{embeddings}.LayerNorm.weight"),
            weight("head.transform.dense.weight", f"{self.dense}.weight"),
            weight("head.transform.norm.weight", f"{self.norm}.weight"),
        ]
        outer = [
            weight("embed.table.weight", f"{embeddings}.word_embeddings.weight"),
            weight("embed.position.weight", f"{embeddings}.position_embeddings.weight"),
            weight("head.bias", self.bias),
            *with_biases(around, True),
        ]
        if not config.tied:
            outer.append(weight("head.weight", "vocab_projector.weight"))
        return [*outer, *per_block(config.stack.depth, with_biases(layer, True))]


HEAD = ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")
_FAMILY = DistilBertFamily("distilbert", BODY, "DistilBertForMaskedLM", 0, *HEAD, 0)
DISTILBERT = Architecture(
    name=_FAMILY.name,
    kind="encoder",
    loader=_FAMILY.loader,
    to_hf=_FAMILY.to_hf,
    from_hf=_FAMILY.from_hf,
    weights=_FAMILY.weights,
    ignored=(r".*\.position_ids", r"vocab_projector\.weight"),
)
