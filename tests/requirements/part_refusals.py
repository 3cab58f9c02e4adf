"""The table of refused parts: mixers, cores and what stands around them, in a model that cannot have them; see
`refusals`."""

from typing import Any

from tests.requirements.depth_refusals import DEPTHS
from tests.requirements.sections import BLOCK, ENCODER, PAIR, Sections, decoder, encoder


def of(model: Sections, **values: Any) -> Sections:
    """A model with other values of its own."""
    return {**model, **values}


def mixer(kind: str = "attention", **values: Any) -> Sections:
    """A decoder with a mixer of four heads, or of those given."""
    return decoder(mixer={"kind": kind, "heads": 4, **values})


def core(kind: str, **values: Any) -> Sections:
    """A decoder with an attention core."""
    return mixer(core={"kind": kind, **values})


def rule(**values: Any) -> Sections:
    """A decoder whose odd blocks have other parts."""
    return decoder({"rules": ({"every": 2, "at": 1, **values},)})


BIAS, SCORES, ROPE = {"kind": "alibi"}, {"kind": "shaw"}, {"kind": "rope"}
THREE = {"kind": "attention", "heads": 3}
MODELS: dict[str, Sections] = {
    "heads that do not divide the width": mixer(heads=5),
    "heads of a rule": rule(mixer=THREE),
    "heads of a list of sublayers": decoder(sublayers=({"part": "mixer", "mixer": THREE}, {"part": "ffn"})),
    "key heads that do not divide the heads": mixer(kv_heads=3),
    "shared queries of fewer keys": mixer(shared_qk=True, kv_heads=2),
    "shared queries of the core": mixer(core={"kind": "reformer"}, kv_heads=2),
    "a mixer's position at the input": mixer(position={"kind": "learned"}),
    "a core that is not causal": core("nystrom"),
    "a core without weights to drop": mixer(core={"kind": "linear"}, dropout=0.1),
    "a core without a bias": of(core("performer"), position=BIAS),
    "a core without scores": of(core("linear"), position=SCORES),
    "a core of another mixer": mixer("longformer", core={"kind": "softmax"}),
    "a mixer that is not causal": decoder(mixer={"kind": "fourier"}),
    "a mixer that is causal alone": encoder(mixer={"kind": "axial", "heads": 4}),
    "a bias on rows of a grid": of(mixer("axial"), position=BIAS),
    "a bias of an output": mixer("branched_attention", output_bias=True),
    "positions that read projections of heads": of(mixer("collaborative"), position={"kind": "deberta"}),
    "layers near the output": decoder(mixer={"kind": "delight", "min_layers": 4, "max_layers": 2}),
    "groups of no power of two": decoder(mixer={"kind": "delight", "max_groups": 3}),
    "a position beside labels of distances": of(encoder(mixer={"kind": "etc", "heads": 4}), position=ROPE),
    "an own position beside global tokens": encoder(mixer={"kind": "longformer", "heads": 4, "position": ROPE}),
    "a bias beside global tokens": of(encoder(mixer={"kind": "longformer", "heads": 4}), position=BIAS),
    "key heads of global tokens": encoder(mixer={"kind": "longformer", "heads": 4, "kv_heads": 2}),
    "two branches of an odd width": of(decoder(mixer={"kind": "evolved_branches"}), width=33),
    "a norm between two convolutions": encoder(mixer={"kind": "evolved_branches", "norm": {"kind": "batch"}}),
    "key heads of a state": mixer("gated_delta_net", key_heads=3),
    "a range of steps": mixer("gated_delta_net", min_step=0.2, max_step=0.1),
    "heads of half a width": mixer("gated_linear_attention", heads=5),
    "more patterns than heads": mixer("guided_attention", heads=2, patterns=("previous", "first", "previous")),
    "a pattern of later tokens": mixer("guided_attention", patterns=("next", "first")),
    "more offsets than heads": mixer("hard_coded_gaussian", heads=2, offsets=(0, -1, -2)),
    "a Gaussian on later tokens": mixer("hard_coded_gaussian", offsets=(12,)),
    "a short range that is long": decoder(mixer={"kind": "long_short_range", "short_range": THREE}),
    "rotated keys of blocks": of(encoder(mixer={"kind": "longt5", "heads": 4}), position=ROPE),
    "positions of a packed sequence": of(encoder(mixer={"kind": "luna", "heads": 4}), position=ROPE),
    "positions of a star": of(encoder(mixer={"kind": "star", "heads": 4}), position=ROPE),
    "groups of a state": mixer("mamba2", groups=3),
    "values that are wider than keys": mixer("mla", value_width=999),
    "a position of whole queries": of(mixer("mla"), position=SCORES),
    "heads that are not narrow": mixer("narrow_and_local", narrow_width=8),
    "rotation of two widths": of(mixer("narrow_and_local"), position=ROPE),
    "weights of other positions": encoder(mixer={"kind": "gmlp", "length": 16}),
    "a prior that is no bias": mixer("prior_only", generator={"kind": "rope"}),
    "capsules that do not divide": mixer("routing_aggregation", capsules=5),
    "a kernel that is too short": decoder(mixer={"kind": "s4", "length": 8}),
    "a convolution without a middle": mixer("sparse_qkv", module_kernel=2),
    "a position of projected tokens": of(mixer("sparse_qkv"), position=SCORES),
    "scores of fewer positions": mixer("synthesizer", generator="random", length=8),
    "a factor of other generators": mixer("synthesizer", generator="random", factor_width=4),
    "a span that is too long": core("adaptive_span", initial_span=99, max_span=8),
    "flex with terms of pairs": of(core("softmax", implementation="flex"), position={"kind": "shaw", "values": True}),
    "a prior without a generator": core("general_prior"),
    "heads without four quarters": mixer(heads=16, core={"kind": "hamilton"}),
    "pooled keys that share weights": encoder(
        mixer={"kind": "attention", "heads": 4, "core": {"kind": "linformer", "projection": "mean", "sharing": "none"}}
    ),
    "a window that is given and predicted": core("local_transformer", fixed_window=4, window_from="layer"),
    "blocks between strides": core("nsa", selection_block=6, compression_stride=4),
    "chunks that leak": core("reformer", scope="chunk"),
    "blocks that leak": core("sinkhorn", sortcut_blocks=2),
    "tables that leak": core("yoso", hashes=2),
    "a gate of both sides": encoder(
        mixer={"kind": "attention", "heads": 4, "core": {"kind": "rfa", "gated": True}},
    ),
    "cores that share heads unevenly": core(
        "split_heads", cores=({"kind": "softmax"}, {"kind": "softmax"}), shares=(2, 1)
    ),
    "shares of other cores": core("split_heads", cores=({"kind": "softmax"}, {"kind": "softmax"}), shares=(1,)),
    "a core of some heads that hands on scores": core(
        "split_heads", cores=({"kind": "softmax"}, {"kind": "prior_scores"})
    ),
    "a pattern that is not causal": core("block_sparse", pattern={"kind": "star"}),
    "parallel sublayers of no ffn": decoder(residual="parallel", ffn={"kind": "none"}),
    "parallel sublayers in an order": decoder(residual="parallel", sublayers=({"part": "mixer"}, {"part": "ffn"})),
    "a cross sublayer without a source": decoder(sublayers=({"part": "mixer"}, {"part": "cross"}, {"part": "ffn"})),
    "an ffn of a mixer": decoder(
        sublayers=({"part": "mixer", "ffn": {"kind": "dense", "hidden": 16}}, {"part": "ffn"})
    ),
    "an entry without an ffn": decoder(sublayers=({"part": "mixer"}, {"part": "ffn"}), ffn={"kind": "none"}),
    "a factor of nothing": decoder(sublayers=({"part": "mixer", "factor": 0.0}, {"part": "ffn"})),
    "a first sublayer in parallel": decoder(sublayers=({"part": "mixer", "parallel": True}, {"part": "ffn"})),
    "no block that mixes": decoder(sublayers=({"part": "ffn"},)),
    "a rule outside of its period": decoder({"rules": ({"every": 2, "at": 2},)}),
    "a signal of one stream": decoder({"step_signal": True}, residual="reversible"),
    "a position of one stream": decoder(residual="reversible", position={"kind": "learned"}),
    "a position of a block in attention": decoder(position=ROPE),
    "an odd width of waves": of(mixer(heads=1), width=33, position={"kind": "sinusoidal"}),
    "a short table": of(decoder(), position={"kind": "learned", "length": 16}),
    "buckets of far distances": of(decoder(), position={"kind": "relative", "buckets": 32, "distance": 8}),
    "a batch's norm of a decoder": decoder(norm={"kind": "batch"}),
    "groups of a norm": encoder(norm={"kind": "power", "groups": 5}),
    "narrow embeddings of no transform": of(ENCODER, embedding_width=16),
    "a mean of no global tokens": of(ENCODER, global_mean=True),
    "dropped weights of no layers": of(PAIR, transparent_dropout=0.1),
    "outputs of all windows": of(
        PAIR, transparent=True, encoder={"depth": 2, "block": BLOCK, "pooling": {"before": (1,)}}
    ),
    "weights by depth that blocks share": of(
        PAIR, init="t_fixup", encoder={"depth": 2, "block": BLOCK, "share": "all"}
    ),
    "modules of two streams": of(decoder(residual="reversible"), mtp={"depth": 1}),
    "modules after exits": of(decoder({"exits": {}}), mtp={"depth": 1}),
    "blocks of hidden units": decoder(ffn={"kind": "sparse", "hidden": 30, "block_size": 8}),
    "more products than keys": decoder(ffn={"kind": "product_key_memory", "subkeys": 4, "top_k": 8}),
    "a router of later tokens": decoder(
        ffn={"kind": "moe", "experts": 4, "router": {"kind": "expert_choice"}, "expert": {"kind": "dense"}}
    ),
    "more choices than experts": decoder(ffn={"kind": "moe", "experts": 2, "router": {"kind": "topk", "top_k": 4}}),
    "a capacity that drops": decoder(ffn={"kind": "moe", "experts": 4, "capacity_factor": 0.1}),
    "groups of a capacity": decoder(ffn={"kind": "moe", "experts": 4, "capacity_groups": 3}),
    "an expert of experts": decoder(ffn={"kind": "moe", "experts": 4, "expert": {"kind": "moe"}}),
    "groups of experts": decoder(
        ffn={"kind": "moe", "experts": 4, "router": {"kind": "group_limited", "expert_groups": 3}}
    ),
    "sublayers of a block that others share": decoder(
        {"share": "all"}, residual={"kind": "attention_residuals", "sublayers": 3}
    ),
    "a pattern without its ids": decoder(
        mixer={"kind": "guided_attention", "heads": 4, "patterns": ("previous", "period")}
    ),
    "two streams of parallel sublayers": decoder(
        residual="reversible", sublayers=({"part": "mixer"}, {"part": "ffn", "parallel": True})
    ),
    "ids of no token": decoder(
        mixer={"kind": "guided_attention", "heads": 4, "patterns": ("period",), "period_ids": (5, 99999)}
    ),
    "frequencies of fewer ids": decoder(
        ffn={
            "kind": "moe",
            "experts": 4,
            "router": {"kind": "hash", "function": "balanced", "frequencies": (1.0, 2.0)},
        }
    ),
}
"""Name -> a model that its parts refuse on sequences of 32 tokens."""
AROUND: dict[str, Sections] = {
    "decoder": {},
    "encoder": {"objective": {"kind": "masked"}, "data": {"cross_documents": True}},
    "encoder_decoder": {
        "objective": {"kind": "seq2seq"},
        "data": {"source": {"kind": "stdlib_pairs"}, "cross_documents": False},
    },
}
"""Kind of a model -> the sections that train it."""
PARTS: dict[str, tuple[str, Sections, int]] = {
    name: ("model_fits_itself", {"model": model, **AROUND[model["kind"]]}, 1)
    for name, model in {**MODELS, **DEPTHS}.items()
}
