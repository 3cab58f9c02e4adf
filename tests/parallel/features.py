"""Features of models that are compared with one process: each a model, and the layouts on which it could differ.

A layout is compared in every run of the suite where the feature has something of its own to do on it (`quick`), and
otherwise among the long tests.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from tests.nn.test_quaternion import MODEL as QUATERNIONS
from tests.parallel.models import changed

Section = dict[str, Any]
TP: Section = {"mesh": {"tp": 2}}
TP_RECOMPUTED: Section = {**TP, "recompute": {"every": 1}}
SP: Section = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
SP_RECOMPUTED: Section = {**SP, "recompute": {"every": 1}}
CP: Section = {"mesh": {"cp": 2}}
CP_RECOMPUTED: Section = {**CP, "recompute": {"every": 1}}
RING: Section = {**CP, "context": {"style": "ring"}}
RING_RECOMPUTED: Section = {**RING, "recompute": {"every": 1}}
ULYSSES: Section = {**CP, "context": {"style": "ulysses"}}
PP: Section = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
V_SHAPED: dict[str, Section] = {
    schedule: {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}} for schedule in ("zbv", "dualpipe_v")
}
DP: Section = {"mesh": {"dp_shard": 2}}
ZERO3: Section = {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}


@dataclass(frozen=True)
class Feature:
    """A model with a feature, and the layouts on which it trains to the numbers of one process."""

    model: Section
    layouts: dict[str, Section]
    quick: tuple[str, ...] = ()
    """The layouts that no other test has in the feature's place."""
    sections: Section = field(default_factory=dict)
    """Other sections of the recipe, and the number of steps."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Part of a parameter's name -> the number of such parameters, without which the feature would not be there."""


def ranks_of(parallel: Section) -> int:
    """Ranks of a layout: as many as its mesh asks for, and two at least."""
    return max(2, prod(degree for axis, degree in parallel.get("mesh", {}).items() if axis != "ep"))


def decoder(position: str | Section, depth: int = 2, /, **block: Any) -> Section:
    return {"kind": "decoder", "width": 32, "position": position, "stack": {"depth": depth, "block": block}}


def attention(**more: Any) -> Section:
    return {"kind": "attention", "heads": 4, **more}


def dense(hidden: int = 24, **more: Any) -> Section:
    return {"kind": "dense", "hidden": hidden, **more}


# Merged priors, and priors alone.
def prior(position: str, **core: Any) -> Feature:
    mixer = attention(kv_heads=2, dropout=0.1, core={"kind": "general_prior", **core})
    layouts = {"sp": SP_RECOMPUTED, "pp": PP, "cp": CP, "zero3": ZERO3}
    return Feature(decoder(position, mixer=mixer, ffn=dense(48)), layouts, sections={"steps": 2})


MIX: Section = {"merge": "mix", "previous": 0.5, "learned": True}
ONLY = [
    {"kind": "prior_only", "heads": 4, "generator": generator, "dropout": 0.1}
    for generator in ("alibi", "relative", "tupe")
]
PRIORS = {
    "prior, relative": prior("relative", **MIX),
    "prior, shaw": prior("shaw", merge="multiply"),
    "prior, alibi": prior("alibi", **MIX),
    "prior alone": Feature(
        {
            "kind": "decoder",
            "width": 32,
            "position": "learned",
            "stack": {
                "depth": 3,
                "block": {"ffn": dense(48)},
                "rules": [{"every": 3, "at": at, "mixer": mixer} for at, mixer in enumerate(ONLY)],
            },
        },
        {"sp": SP_RECOMPUTED, "pp": PP, "zero3": ZERO3},
        sections={"steps": 2},
    ),
}

# BART: sources of other lengths than their texts, two norms of embeddings, all corruptions at once.
BART_BLOCK = {
    "mixer": attention(bias=True, dropout=0.1),
    "ffn": dense(activation="gelu", bias=True),
    "norm": "layer",
    "residual": "post",
    "dropout": 0.1,
}
BART = Feature(
    {
        "kind": "encoder_decoder",
        "width": 32,
        "position": "learned",
        "embedding_norm": "layer",
        "dropout": 0.1,
        "encoder": {"depth": 2, "block": BART_BLOCK},
        "decoder": {"depth": 2, "block": BART_BLOCK},
    },
    {"dp": DP, "tp": TP, "sp": SP, "cp": CP, "pp": PP, "zero3": {"zero": {"stage": 3}}},
    sections={
        "objective": {"kind": "denoising", "masked_tokens": 0.1, "deleted_tokens": 0.2, "rotated_documents": 0.5}
    },
)

# Transparent attention: the decoder's mixes of all encoder layers.
PLAIN_BLOCK = {"mixer": attention(), "ffn": dense(), "dropout": 0.1}
TRANSPARENT = Feature(
    {
        "kind": "encoder_decoder",
        "width": 32,
        "position": "learned",
        "transparent": True,
        "transparent_dropout": 0.2,
        "encoder": {"depth": 2, "block": PLAIN_BLOCK},
        "decoder": {"depth": 2, "block": PLAIN_BLOCK},
    },
    {
        "sp": SP_RECOMPUTED,
        "tp": TP,
        "cp": CP,
        "zero3": {"zero": {"stage": 3}},
        "pp": PP,
        "pp in the encoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [1, 3]}},
        "pp in the decoder": {**PP, "pipeline": {"schedule": "gpipe", "blocks_per_stage": [3, 1]}},
        "pp and sp": {
            "mesh": {"pp": 2, "tp": 2},
            "tensor": {"sequence": True},
            "pipeline": {"blocks_per_stage": [1, 3]},
        },
    },
    quick=("pp in the encoder",),
)

# DeLighT: the transformation is of one token, and its one head is not sharded.
DELIGHT_MIXER = {"kind": "delight", "min_layers": 2, "max_layers": 4, "max_groups": 4}
DELIGHT = Feature(
    {
        "kind": "decoder",
        "width": 32,
        "stack": {"depth": 2, "block": {"mixer": DELIGHT_MIXER, "ffn": dense(8), "dropout": 0.1}},
    },
    {"cp": CP_RECOMPUTED, "pp": PP, "zero3": ZERO3},
    quick=("cp",),
)

# The sparse feed-forward layer: its blocks are sharded, and the noise is that of one process.
SPARSE_FFN = {"kind": "sparse", "hidden": 48, "block_size": 6, "controller_width": 5, "hard_fraction": 0.5}
SPARSE = Feature(
    {
        "kind": "decoder",
        "width": 32,
        "stack": {"depth": 2, "block": {"mixer": attention(), "ffn": SPARSE_FFN, "dropout": 0.1}},
    },
    {
        "sp": SP_RECOMPUTED,
        "cp": CP,
        "pp": PP,
        "zero3": ZERO3,
        "cp and sp": {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}},
    },
    quick=("sp", "cp"),
)


# Sparse QKV: its convolution fetches the tokens before a shard.
def sparse_qkv(kind: str = "decoder", **changes: Any) -> Section:
    mixer = {"kind": "sparse_qkv", "heads": 4, "modules": 8, **changes}
    block = {"mixer": mixer, "ffn": {"kind": "sparse", "hidden": 32, "block_size": 4}, "dropout": 0.1}
    return {"kind": kind, "width": 32, "stack": {"depth": 2, "block": block}}


SPARSE_QKV = Feature(sparse_qkv(), {"cp": CP, "ring": RING_RECOMPUTED, "pp": PP, "zero3": ZERO3}, quick=("cp",))
SPARSE_QKV_ENCODER = Feature(sparse_qkv("encoder", output=True, length_kernel=4), {"cp": CP})


# Parameters that all layers share: tables of cores, Transformer-XL's u and v; and YOSO's hash functions.
def layer_tables(kind: str, core: Section, tables: int) -> Feature:
    mixer = attention(kv_heads=2, core=core)
    return Feature(
        {"kind": kind, "width": 32, "position": "none", "stack": {"depth": 2, "block": {"mixer": mixer}}},
        {"sp": SP_RECOMPUTED, "cp": CP, "pp": PP, "zero3": ZERO3},
        sections={"data": {"cross_documents": tables == 1}},
        parameters={"core_tables": tables},
    )


def transformer_xl(depth: int) -> Section:
    """A decoder whose layers have one u and v."""
    return decoder({"kind": "transformer_xl", "shared_biases": True}, depth, mixer=attention(kv_heads=2))


LINFORMER = {"kind": "linformer", "projected_length": 6, "sharing": "layers"}
TABLES = {
    "tables of linformer": layer_tables(
        "encoder", {"kind": "linformer", "projected_length": 6, "sharing": "layers"}, 1
    ),
    "tables of nprf": layer_tables("decoder", {"kind": "nprf", "features": 6, "shared": True}, 1),
    "hashes of yoso": layer_tables("encoder", {"kind": "yoso", "hashes": 4, "convolution": 3}, 0),
    "biases of transformer-xl": Feature(
        transformer_xl(2),
        {"sp": SP_RECOMPUTED, "ring": RING, "ulysses": ULYSSES, "pp": PP, "zero3": ZERO3},
        parameters={"position_tables": 2},
    ),
}

# Positions that are added to the input of each block.
ADDED = decoder("none", mixer=attention(), ffn=dense(), position="learned", dropout=0.1)
FLOATER = changed(ADDED, stack__block__position={"kind": "floater", "hidden": 8, "interval": 0.05})
OF_BLOCKS = {"tp": TP_RECOMPUTED, "sp": SP, "cp": CP, "pp": PP, "zero3": ZERO3}

# Mixtures of labelled texts route the text alone, of which every rank of a sample has to know the rows.
MIXTURE = {
    "kind": "moe",
    "experts": 4,
    "router": {"kind": "gshard", "balance_over": "sequence", "jitter": 0.01, "z_loss_weight": 0.1},
    "expert": {"kind": "dense", "hidden": 16},
    "capacity_factor": 1.0,
    "eval_capacity_factor": 1.0,
    "expert_dropout": 0.1,
}
LABELLED: Section = {
    "objective": {"kind": "classify", "dense": True},
    "data": {"source": {"kind": "labelled", "paths": ["a.jsonl"], "labels": "class"}},
}
MIXTURE_OF_TEXTS = Feature(
    {
        "kind": "encoder",
        "width": 32,
        "position": "learned",
        "stack": {"depth": 2, "block": {"mixer": attention(), "ffn": MIXTURE, "dropout": 0.1}},
    },
    {
        "tp": TP,
        "sp": SP_RECOMPUTED,
        "cp": CP_RECOMPUTED,
        "pp": PP,
        "zero3": ZERO3,
        "ep": {"mesh": {"dp_shard": 2, "ep": 2}},
    },
    quick=("cp", "ep"),
    sections=LABELLED,
)

# Halting, the ponder cost and the signals of a Universal Transformer, of which a token halts after one or more steps.
POST = {"mixer": attention(), "ffn": dense(), "norm": "layer", "residual": "post", "dropout": 0.1}
STEPS: Section = {"share": "all", "step_signal": True, "block": POST, "halting": {"epsilon": 0.1, "ponder_weight": 0.1}}
STEPS["halting"]["bias"] = -0.5
HALTING = Feature(
    {"kind": "decoder", "width": 32, "position": "none", "stack": {"depth": 4, **STEPS}},
    {
        "tp": TP_RECOMPUTED,
        "sp": SP_RECOMPUTED,
        "cp": CP_RECOMPUTED,
        "ulysses": ULYSSES,
        "pp": PP,
        "gpipe and zero3": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "gpipe"}, "zero": {"stage": 3}},
        "zero bubble": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
        "zero3": ZERO3,
        "compiled": {"mesh": {"tp": 2}, "compile": True},
        "sp, cp and pp": {"mesh": {"pp": 2, "cp": 2, "tp": 2}, "tensor": {"sequence": True}},
    },
    quick=("sp", "cp", "pp"),
)
SIGNALS = changed(HALTING.model, stack__halting=None)
PACKED = Feature(HALTING.model, {"sp": SP, "cp": CP, "pp": PP}, sections={"data": {"cross_documents": False}})
HALTING_PAIR = Feature(
    {
        "kind": "encoder_decoder",
        "width": 32,
        "position": "none",
        "encoder": {"depth": 2, **STEPS},
        "decoder": {"depth": 3, **STEPS},
    },
    {
        "sp": SP,
        "cp": CP,
        "pp in the encoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [1, 4]}},
        "pp between the stacks": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [2, 3]}},
        "pp in the decoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [3, 2]}},
    },
    quick=("pp in the encoder",),
    sections={
        "objective": {"kind": "seq2seq"},
        "data": {"source": {"kind": "pairs", "paths": ["x"]}, "cross_documents": False},
    },
)
GATED: Section = {"block": {**PLAIN_BLOCK, "gates": {"budgets": [0.25, 0.75], "loss_weight": 0.5, "hidden": 6}}}
GATES = Feature(
    {"kind": "decoder", "width": 32, "position": "learned", "tied": False, "stack": {"depth": 4, **GATED}},
    {
        "sp": SP_RECOMPUTED,
        "sp and pp": {**SP, "mesh": {"pp": 2, "tp": 2}},
        "sp and cp": {**SP, "mesh": {"cp": 2, "tp": 2}},
        **V_SHAPED,
    },
    quick=("sp",),
)
GATED_PAIR = Feature(
    {
        "kind": "encoder_decoder",
        "width": 32,
        "position": "learned",
        "encoder": {"depth": 2, **GATED},
        "decoder": {"depth": 2, **GATED},
    },
    {
        "pp": PP,
        "pp in the encoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [1, 3]}},
        "pp in the decoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [3, 1]}},
        "sp": SP,
        "sp and pp": {**SP, "mesh": {"pp": 2, "tp": 2}, "pipeline": {"blocks_per_stage": [1, 3]}},
    },
    quick=("pp in the encoder",),
)

FEATURES: dict[str, Feature] = {
    **PRIORS,
    "bart": BART,
    "transparent": TRANSPARENT,
    "quaternions": Feature(QUATERNIONS, {"cp": CP_RECOMPUTED, "pp": PP, "zero3": ZERO3}, quick=("cp",)),
    "delight": DELIGHT,
    "sparse ffn": SPARSE,
    "sparse qkv": SPARSE_QKV,
    "sparse qkv, encoder": SPARSE_QKV_ENCODER,
    **TABLES,
    "step signals": Feature(SIGNALS, {"sp": SP_RECOMPUTED, "cp": CP, "pp": PP}, quick=("sp",)),
    "halting": HALTING,
    "halting, packed": PACKED,
    "halting of pairs": HALTING_PAIR,
    "gates": GATES,
    "gates of pairs": GATED_PAIR,
    "positions of blocks": Feature(ADDED, OF_BLOCKS, quick=("sp", "cp", "pp")),
    "mixture of labelled texts": MIXTURE_OF_TEXTS,
    "floater of blocks": Feature(FLOATER, OF_BLOCKS, parameters={"position_tables": 4}),
}

REFUSED: dict[str, tuple[Section, Section, tuple[str, ...]]] = {
    "one head of delight": (DELIGHT.model, TP, ("tp=2 does not divide heads=1. Take 1.",)),
    "heads that do not divide the blocks of a sparse ffn": (
        changed(SPARSE.model, stack__block__mixer={"kind": "attention", "heads": 3, "head_width": 8}),
        {"mesh": {"tp": 3}},
        # 2, 4 and 8 divide the blocks, and not the heads.
        ("tp=3 does not divide the 8 blocks of hidden units of ffn 'sparse'. Take 1.",),
    ),
    "modules of sparse qkv": (
        sparse_qkv(),
        TP,
        (
            "mixer 'sparse_qkv' mixes the heads of a token, so tp cannot shard them",
            "Take 1, or model.stack.block.mixer.kind=attention.",
        ),
    ),
    "modules of sparse qkv, output too": (
        sparse_qkv(output=True),
        TP,
        ("mixer 'sparse_qkv' mixes the heads of a token, so tp cannot shard them",),
    ),
    "two stages of a rank that share biases": (
        transformer_xl(8),
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
        ("two copies of stack.position_tables.", "or model.position.shared_biases=false."),
    ),
    "two stages of a rank that share a halting unit": (
        {**changed(HALTING.model, stack__share="none"), "tied": False},
        V_SHAPED["zbv"],
        ("'zbv' puts two copies of stack.halting.weight and of others, 2 in all, on one rank", "Take 1f1b."),
    ),
    "two stages of a rank that share dynamics": (
        changed(FLOATER, stack__depth=8),
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
        ("two copies of stack.position_tables.", "Or take another stack.block.position."),
    ),
}
"""Name of a refusal -> the model, the layout, and the words of one problem."""
