"""Mamba-2 (Dao and Gu 2024): blocks of the mixer `mamba2` alone."""

from typing import Any

from xscale.convert.hf.architecture import Requirements
from xscale.convert.hf.tables.keys import SameKey
from xscale.convert.hf.tables.model_type import ModelType
from xscale.convert.hf.tables.stack import StackTable
from xscale.convert.hf.tables.tensors import Moved, RowContext, blocks, rows_concatenated
from xscale.convert.mapping import Transform


def _inner(config: Any) -> int:
    """Return the channels of all heads."""
    mixer = config.stack.block_config(0).mixer
    return int(mixer.heads * (mixer.head_width or 2 * config.width // mixer.heads))


def _expansion(config: Any, require: Requirements) -> None:
    if _inner(config) % config.width:
        what = f"{_inner(config)} channels of the heads are no multiple of the width"
        require.reject("model.stack.block.mixer.head_width", what, "Twice the width would map.")


def _convolutions(row: RowContext) -> Transform:
    """Return the transform of kernels [C, K] to one of [C, 1, K], with the channels of all; biases are vectors."""
    rows = rows_concatenated(row)
    if len(row.shapes[0]) == 1:
        return rows
    return Transform(
        lambda tensors: [rows.forward(tensors)[0][:, None]],
        lambda tensors: rows.inverse([tensors[0][:, 0]]),
    )


MAMBA2 = ModelType(
    name="mamba2",
    loader="Mamba2ForCausalLM",
    model={
        "kind": "decoder",
        "width": SameKey("hidden_size"),
        "position": {"kind": "none"},
        "tied": SameKey("tie_word_embeddings"),
        "init_std": SameKey("initializer_range"),
        "stack": StackTable(
            "num_hidden_layers",
            {
                "mixer": {
                    "kind": "mamba2",
                    "heads": SameKey("num_heads"),
                    "head_width": SameKey("head_dim"),
                    "states": SameKey("state_size"),
                    "groups": SameKey("n_groups"),
                    "convolution": SameKey("conv_kernel"),
                    "eps": SameKey("layer_norm_epsilon"),
                    "bias": False,
                },
                "ffn": "none",
                "norm": {"kind": "rms", "eps": SameKey("layer_norm_epsilon")},
                "residual": "pre",
            },
        ),
    },
    tensors={
        "embed.table": "backbone.embeddings",
        "stack.norm": "backbone.norm_f",
        "head": "lm_head",
        **blocks(
            "stack.blocks.{i}",
            "backbone.layers.{i}",
            {
                "mixer.norm": "norm",
                " ".join(f"mixer.part.{part}" for part in ("gate", "x", "b", "c", "step")): Moved(
                    "mixer.in_proj", rows_concatenated
                ),
                " ".join(f"mixer.part.{part}_convolution" for part in "xbc"): Moved(
                    "mixer.conv1d", _convolutions
                ),
                "mixer.part.decay.log_rate": "mixer.A_log",
                "mixer.part.decay.bias": "mixer.dt_bias",
                "mixer.part.skip": "mixer.D",
                "mixer.part.norm": "mixer.norm",
                "mixer.part.o": "mixer.out_proj",
            },
        ),
    },
    fixed={
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "hidden_act": ("silu", "swish"),
    },
    prefix="backbone.",
    length_key="",
    ignored=(),
    ignored_keys=frozenset({"chunk_size", "expand", "residual_in_fp32", "rescale_prenorm_residual"})
    | {f"time_step_{key}" for key in ("rank", "min", "max", "floor")},
    checks=(_expansion,),
    writes=lambda config, sizes: {"expand": _inner(config) // config.width},
)
