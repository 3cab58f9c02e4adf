"""Decoders with layer norms and dense feed-forward parts: GPT-2 (Radford et al. 2019), GPT-Neo, GPT-NeoX and Pythia
(Black et al. 2022), OPT (Zhang et al. 2022), MPT, StarCoder2 (Lozhkov et al. 2024), StableLM 2."""

from collections.abc import Sequence
from typing import Any

from xscale.convert.hf.architecture import Data, Requirements
from xscale.convert.hf.tables.decoders import (
    CORE,
    RopeKeys,
    WindowKey,
    heads_divide_width,
    longest_window,
)
from xscale.convert.hf.tables.keys import (
    ByKey,
    ByLayer,
    Initial,
    KeyMapping,
    LayerKinds,
    Reading,
    Renamed,
    SameKey,
    Table,
    Writing,
    one_value,
)
from xscale.convert.hf.tables.model_type import ModelType
from xscale.convert.hf.tables.stack import StackTable
from xscale.convert.hf.tables.tensors import Moved, RowContext, Rows, blocks
from xscale.convert.mapping import (
    CONCATENATED_TRANSPOSED,
    TRANSPOSED,
    Transform,
    interleaved_qkv,
    rows_before,
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
}
"""Name of an activation in transformers -> name in xscale."""


class Hidden(KeyMapping):
    """The hidden units of a dense part; null in config.json: four times the width."""

    def __init__(self, key: str, width: str) -> None:
        self.key, self.width = key, width

    def read(self, reading: Reading, name: str) -> int:
        return int(reading.data.get(self.key) or 4 * reading.data[self.width])

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        writing.put(self.key, one_value(values, path, writing), path)

    def names(self) -> set[str]:
        return {self.key}


def decoder(width: str, depth: str, heads: str, eps: str, ffn: Table, **changes: Any) -> Table:
    """Return the table of a decoder with learned positions, biases and these keys."""
    dropouts = changes.pop("dropouts")
    block: Table = {
        "mixer": {
            "kind": "attention",
            "heads": SameKey(heads),
            "core": CORE,
            "bias": True,
            "dropout": SameKey(dropouts[2]),
        },
        "ffn": {"kind": "dense", "bias": True, **ffn},
        "norm": {"kind": "layer", "eps": SameKey(eps), "bias": True},
        "residual": "pre",
        "dropout": SameKey(dropouts[1]),
    }
    return {
        "kind": "decoder",
        "width": SameKey(width),
        "position": {"kind": "learned", "length": SameKey("max_position_embeddings")},
        "tied": SameKey("tie_word_embeddings"),
        "dropout": SameKey(dropouts[0]),
        "init_std": SameKey("initializer_range"),
        "stack": StackTable(depth, block),
        **changes,
    }


def _rows(prefix: str, outer: Rows, block: Rows) -> Rows:
    return outer | blocks("stack.blocks.{i}", prefix, block)


GPT2 = ModelType(
    name="gpt2",
    loader="GPT2LMHeadModel",
    model=decoder(
        "n_embd",
        "n_layer",
        "n_head",
        "layer_norm_epsilon",
        {
            "hidden": Hidden("n_inner", "n_embd"),
            "activation": Renamed("activation_function", ACTIVATIONS),
        },
        dropouts=("embd_pdrop", "resid_pdrop", "attn_pdrop"),
        position={"kind": "learned", "length": SameKey("n_positions")},
    ),
    tensors=_rows(
        "transformer.h.{i}",
        {
            "embed.table": "transformer.wte",
            "embed.position": "transformer.wpe",
            "stack.norm": "transformer.ln_f",
            "head": "lm_head",
        },
        {
            "mixer.norm": "ln_1",
            "mixer.part.q mixer.part.k mixer.part.v": Moved("attn.c_attn", CONCATENATED_TRANSPOSED),
            "mixer.part.o": Moved("attn.c_proj", TRANSPOSED),
            "ffn.norm": "ln_2",
            "ffn.part.up": Moved("mlp.c_fc", TRANSPOSED),
            "ffn.part.down": Moved("mlp.c_proj", TRANSPOSED),
        },
    ),
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    length_key="n_positions",
    prefix="transformer.",
    ignored=(r".*\.attn\.(bias|masked_bias)",),
    ignored_keys=frozenset({"reorder_and_upcast_attn", "n_ctx"})
    | {f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels")}
    | {"summary_first_dropout", "classifier_dropout"},
    checks=(heads_divide_width,),
)


def _by_head(row: RowContext) -> Transform:
    return interleaved_qkv(row.block.mixer.heads, 1)


GPT_NEOX = ModelType(
    name="gpt_neox",
    loader="GPTNeoXForCausalLM",
    model=decoder(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "layer_norm_eps",
        {
            "hidden": SameKey("intermediate_size"),
            "activation": Renamed("hidden_act", ACTIVATIONS),
        },
        dropouts=("hidden_dropout", "hidden_dropout", "attention_dropout"),
        position=RopeKeys(partial=True),
    ),
    tensors=_rows(
        "gpt_neox.layers.{i}",
        {
            "embed.table": "gpt_neox.embed_in",
            "stack.norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        {
            "mixer.norm": "input_layernorm",
            "mixer.part.q mixer.part.k mixer.part.v": Moved("attention.query_key_value", _by_head),
            "mixer.part.o": "attention.dense",
            "ffn.norm": "post_attention_layernorm",
            "ffn.part.up": "mlp.dense_h_to_4h",
            "ffn.part.down": "mlp.dense_4h_to_h",
        },
    ),
    prefix="gpt_neox.",
    ignored=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
    checks=(heads_divide_width,),
).variant(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    block={
        "mixer": {"bias": SameKey("attention_bias")},
        "residual": ByKey(
            "use_parallel_residual",
            {True: {"kind": "parallel", "placement": "pre"}, False: "pre"},
        ),
    },
)
_SELF_ATTENTION: Rows = {
    "mixer.norm": "input_layernorm",
    "mixer.part.q": "self_attn.q_proj",
    "mixer.part.k": "self_attn.k_proj",
    "mixer.part.v": "self_attn.v_proj",
    "mixer.part.o": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
}
_MODEL: Rows = {"embed.table": "model.embed_tokens", "stack.norm": "model.norm", "head": "lm_head"}
_KV_HEADS = {"kv_heads": SameKey("num_key_value_heads", "=num_attention_heads")}
_USE_BIAS = {"bias": SameKey("use_bias")}
STARCODER2 = GPT_NEOX.variant(
    "starcoder2",
    "Starcoder2ForCausalLM",
    model={"position": RopeKeys(), "dropout": SameKey("embedding_dropout")},
    block={
        "mixer": {**_KV_HEADS, **_USE_BIAS, "core": WindowKey()},
        "ffn": _USE_BIAS,
        "norm": {"eps": SameKey("norm_epsilon")},
        "residual": "pre",
        "dropout": SameKey("residual_dropout"),
    },
    tensors=_rows(
        "model.layers.{i}",
        _MODEL,
        {**_SELF_ATTENTION, "ffn.part.up": "mlp.c_fc", "ffn.part.down": "mlp.c_proj"},
    ),
    prefix="",
    attention_span=longest_window,
)
STABLELM = GPT_NEOX.variant(
    "stablelm",
    "StableLmForCausalLM",
    model={"dropout": Initial(0.0)},
    block={
        "mixer": {**_KV_HEADS, "bias": SameKey("use_qkv_bias"), "output_bias": False},
        "ffn": {"kind": "gated", "gate": "swiglu", "hidden": SameKey("intermediate_size")},
        "residual": "pre",
    },
    # In parallel, both sublayers have one norm.
    fixed={
        "hidden_act": ("silu", "swish"),
        "use_parallel_residual": (False,),
        "qk_layernorm": (False,),
    },
    tensors=_rows(
        "model.layers.{i}",
        _MODEL,
        {
            **_SELF_ATTENTION,
            "ffn.part.gate": "mlp.gate_proj",
            "ffn.part.up": "mlp.up_proj",
            "ffn.part.down": "mlp.down_proj",
        },
    ),
    prefix="",
)


def _no_projection(data: Data, require: Requirements) -> None:
    width = data["hidden_size"]
    require.one_of("word_embed_proj_dim", data.get("word_embed_proj_dim") or width, width)


OPT = GPT2.variant(
    "opt",
    "OPTForCausalLM",
    model=decoder(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "unused",
        {
            "hidden": SameKey("ffn_dim"),
            "activation": Renamed("activation_function", ACTIVATIONS),
        },
        dropouts=("dropout", "dropout", "attention_dropout"),
        init_std=SameKey("init_std"),
    ),
    block={
        "norm": {"eps": Initial(1e-5)},
        "mixer": {"bias": SameKey("enable_bias")},
        "ffn": {"bias": SameKey("enable_bias")},
    },
    fixed={
        "scale_attn_weights": None,
        "scale_attn_by_inverse_layer_idx": None,
        "add_cross_attention": None,
        "do_layer_norm_before": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
    length_key="max_position_embeddings",
    prefix="model.",
    ignored=(),
    ignored_keys=frozenset({"layerdrop"}),
    hf_checks=(_no_projection,),
    tensors=_rows(
        "model.decoder.layers.{i}",
        {
            "embed.table": "model.decoder.embed_tokens",
            "embed.position": Moved("model.decoder.embed_positions", rows_before(2)),
            "stack.norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        {
            **_SELF_ATTENTION,
            "mixer.norm": "self_attn_layer_norm",
            "mixer.part.o": "self_attn.out_proj",
            "ffn.norm": "final_layer_norm",
            "ffn.part.up": "fc1",
            "ffn.part.down": "fc2",
        },
    ),
)


def _attention_kinds(data: Data) -> Sequence[str]:
    return [
        kind for kinds, times in data["attention_types"] for _ in range(times) for kind in kinds
    ]


def _attention_types(kinds: Sequence[str]) -> Data:
    return {"attention_types": [[list(kinds), 1]]}


GPT_NEO = GPT2.variant(
    "gpt_neo",
    "GPTNeoForCausalLM",
    model=decoder(
        "hidden_size",
        "num_layers",
        "num_heads",
        "layer_norm_epsilon",
        {
            "hidden": Hidden("intermediate_size", "hidden_size"),
            "activation": Renamed("activation_function", ACTIVATIONS),
        },
        dropouts=("embed_dropout", "resid_dropout", "attention_dropout"),
    ),
    block={
        "mixer": {
            "bias": False,
            "output_bias": True,
            "scale": Initial(1.0),
            "core": ByLayer(
                LayerKinds(_attention_kinds, _attention_types),
                {"global": CORE, "local": WindowKey(some=True, key="window_size")},
                "attention_types",
            ),
        }
    },
    fixed={
        "scale_attn_weights": None,
        "scale_attn_by_inverse_layer_idx": None,
        "add_cross_attention": None,
    },
    tensors=_rows(
        "transformer.h.{i}",
        {},
        {
            "mixer.part.q": "attn.attention.q_proj",
            "mixer.part.k": "attn.attention.k_proj",
            "mixer.part.v": "attn.attention.v_proj",
            "mixer.part.o": "attn.attention.out_proj",
            "ffn.part.up": "mlp.c_fc",
            "ffn.part.down": "mlp.c_proj",
        },
    ),
    length_key="max_position_embeddings",
    ignored_keys=frozenset({"attention_layers", "classifier_dropout"})
    | {key for key in GPT2.ignored_keys if key.startswith("summary_")},
    attention_span=longest_window,
)
