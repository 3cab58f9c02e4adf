"""BART (Lewis et al. 2020): a post-norm encoder-decoder with learned positions and a norm of the embeddings."""

from collections.abc import Callable

from torch import Tensor

from xscale.convert.hf.architecture import Data
from xscale.convert.hf.tables.decoders import CORE
from xscale.convert.hf.tables.keys import Initial, Renamed, SameKey, Table
from xscale.convert.hf.tables.model_type import ModelType
from xscale.convert.hf.tables.stack import StackTable
from xscale.convert.hf.tables.tensors import Moved, Rows, blocks
from xscale.convert.hf.types.layer_norm import ACTIVATIONS
from xscale.convert.mapping import rows_before
from xscale.core.errors import ConfigError

LOGITS_BIAS = "final_logits_bias"
NORM = {"kind": "layer", "eps": Initial(1e-5), "bias": True}
"""The norm of every sublayer; config.json has no key for its epsilon."""


def _stack(name: str) -> StackTable:
    mixer = {
        "kind": "attention",
        "heads": SameKey(f"{name}_attention_heads"),
        "core": CORE,
        "bias": True,
        "dropout": SameKey("attention_dropout"),
    }
    block: Table = {
        "mixer": mixer,
        "ffn": {
            "kind": "dense",
            "hidden": SameKey(f"{name}_ffn_dim"),
            "activation": Renamed("activation_function", ACTIVATIONS),
            "bias": True,
        },
        "norm": NORM,
        "residual": "post",
        "dropout": SameKey("dropout"),
    }
    return StackTable(f"{name}_layers", block)


def _sublayer(sublayer: str, attention: str) -> Rows:
    parts = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    return {
        **{f"{sublayer}.part.{part}": f"{attention}.{name}" for part, name in parts.items()},
        f"{sublayer}.norm": f"{attention}_layer_norm",
    }


def _rows(stack: str, embed: str) -> Rows:
    body = f"model.{stack}"
    return {
        f"{embed}.position": Moved(f"{body}.embed_positions", rows_before(2)),
        f"{embed}.norm": f"{body}.layernorm_embedding",
        **blocks(
            f"{stack}.blocks.{{i}}",
            f"{body}.layers.{{i}}",
            {
                **_sublayer("mixer", "self_attn"),
                **_sublayer("cross", "encoder_attn"),
                "ffn.part.up": "fc1",
                "ffn.part.down": "fc2",
                "ffn.norm": "final_layer_norm",
            },
        ),
    }


def _without_logits_bias(section: Data, tensor: Callable[[str], Tensor | None]) -> Data:
    """Refuse a bias of the logits that is not zero, as that of no published BART is."""
    bias = tensor(LOGITS_BIAS)
    if bias is not None and bias.any():
        what = "the bias of the logits is not zero and has no counterpart in xscale"
        raise ConfigError(LOGITS_BIAS, what, "A model without it would map.")
    return section


BART = ModelType(
    name="bart",
    loader="BartForConditionalGeneration",
    model={
        "kind": "encoder_decoder",
        "width": SameKey("d_model"),
        "position": {"kind": "learned", "length": SameKey("max_position_embeddings")},
        "tied": True,
        "dropout": SameKey("dropout"),
        "init_std": SameKey("init_std"),
        "scale_embeddings": SameKey("scale_embedding"),
        "scale_head": False,
        "embedding_norm": NORM,
        "encoder": _stack("encoder"),
        "decoder": _stack("decoder"),
    },
    tensors={
        "source.table": "model.shared",
        **_rows("encoder", "source"),
        **_rows("decoder", "target"),
    },
    fixed={"tie_word_embeddings": (True,)},
    writes=lambda config, sizes: {
        "activation_dropout": 0.0,
        "is_encoder_decoder": True,
        "decoder_start_token_id": sizes.eos,
        "forced_eos_token_id": None,
    },
    prefix="model.",
    ignored=(LOGITS_BIAS, r"(model\.)?(encoder|decoder)\.embed_tokens\.weight"),
    ignored_keys=frozenset({"activation_dropout", "encoder_layerdrop", "decoder_layerdrop"})
    | {"forced_eos_token_id", "classifier_dropout", "num_hidden_layers", "is_decoder"},
    with_tensors=_without_logits_bias,
    objective="denoising",
    notes=(
        "dropout: transformers can also drop the ffn's hidden units (activation_dropout) and whole layers (layerdrop), "
        "and xscale does not",
        "decoder_start_token_id: the end of a document, as the objective denoising has it and seq2seq with begin=eos",
    ),
)
