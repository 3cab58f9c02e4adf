"""ALBERT (Lan et al. 2020): BERT with one block for all layers and factorised embeddings."""

from typing import Any

from xscale.convert.hf.architecture import (
    Architecture,
    Data,
    ModelSizes,
    Requirements,
    SentenceHeadLayout,
)
from xscale.convert.hf.bert import TYPES, BertFamily
from xscale.convert.mapping import (
    DUPLICATED,
    WeightMapping,
    positions_and_types,
    weight,
    with_biases,
)

LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
"""Prefix of the one block's tensors."""
PROJECTION = "albert.encoder.embedding_hidden_mapping_in"


class AlbertFamily(BertFamily):
    """ALBERT: its keys are those of BERT and the width of the embeddings, its blocks have the shared sublayers."""

    def to_hf(self, config: Any, sizes: ModelSizes, require: Requirements) -> Data:
        require.one_of("model.stack.share", config.stack.share, "all")
        if config.embedding_width is None:
            what = "has a linear map from the embeddings to the blocks"
            require.reject(
                "model.embedding_width",
                f"{require.architecture} {what}",
                "An embedding_width would map.",
            )
        data = super().to_hf(config, sizes, require)
        layers = {
            "embedding_size": config.embedding_width,
            "num_hidden_groups": 1,
            "inner_group_num": 1,
        }
        return data and data | layers

    def from_hf(self, data: Data, require: Requirements) -> Data:
        require.one_of("num_hidden_groups", data["num_hidden_groups"], 1)
        require.one_of("inner_group_num", data["inner_group_num"], 1)
        section = super().from_hf(data, require)
        stack = {**section["stack"], "share": "all"}
        return {**section, "embedding_width": data["embedding_size"], "stack": stack}

    def weights(self, config: Any, sizes: ModelSizes) -> list[WeightMapping]:
        shared, embeddings = "stack.shared", "albert.embeddings"
        maps = [
            weight(f"{shared}.mixer.part.{part}.weight", f"{LAYER}.attention.{name}.weight")
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "dense"))
        ]
        maps += [
            weight(f"{shared}.mixer.norm.weight", f"{LAYER}.attention.LayerNorm.weight"),
            weight(f"{shared}.ffn.part.up.weight", f"{LAYER}.ffn.weight"),
            weight(f"{shared}.ffn.part.down.weight", f"{LAYER}.ffn_output.weight"),
            weight(f"{shared}.ffn.norm.weight", f"{LAYER}.full_layer_layer_norm.weight"),
            weight("embed.norm.weight", f"{embeddings}.LayerNorm.weight"),
            weight("embed.project.weight", f"{PROJECTION}.weight"),
            weight("head.transform.dense.weight", f"{self.dense}.weight"),
            weight("head.transform.norm.weight", f"{self.norm}.weight"),
        ]
        positions, types = (
            f"{embeddings}.position_embeddings.weight",
            f"{embeddings}.token_type_embeddings.weight",
        )
        tables = [
            weight(
                "embed.position.weight", f"{positions} {types}", positions_and_types(0, self.types)
            )
        ]
        if config.token_types:
            tables = [weight("embed.position.weight", positions), weight("embed.types", types)]
        outer = [weight("embed.table.weight", f"{embeddings}.word_embeddings.weight"), *tables]
        if config.tied:
            outer.append(weight("head.bias", self.bias))
        else:
            # As in BERT: for an untied head the library adds the decoder's bias.
            outer.append(weight("head.weight", "predictions.decoder.weight"))
            outer.append(weight("head.bias", f"predictions.decoder.bias {self.bias}", DUPLICATED))
        if config.sentence_head is not None:
            outer += SENTENCE_ORDER.weights()
        return [*outer, *with_biases(maps, True)]


SENTENCE_ORDER = SentenceHeadLayout(
    "AlbertForPreTraining", "albert.pooler", "sop_classifier.classifier", "sop_logits"
)
ALBERT_HEAD = ("predictions.dense", "predictions.LayerNorm", "predictions.bias")
_FAMILY = AlbertFamily("albert", "albert", "AlbertForMaskedLM", 0, *ALBERT_HEAD, 2)
ALBERT = Architecture(
    name=_FAMILY.name,
    kind="encoder",
    loader=_FAMILY.loader,
    to_hf=_FAMILY.to_hf,
    from_hf=_FAMILY.from_hf,
    weights=_FAMILY.weights,
    ignored=(
        r".*\.position_ids",
        r".*\.pooler\..*",
        r"sop_classifier\..*",
        r"predictions\.decoder\.(bias|weight)",
    ),
    notes=(TYPES,),
    features=frozenset({"stack.share", "embedding_width", "sentence_head"}),
    sentence_head=SENTENCE_ORDER,
)
