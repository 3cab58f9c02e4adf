"""The table of refused recipes: what is laid over a small one, the number of ranks, and the requirement that speaks."""

from typing import Any

from xscale.core.config import decode
from xscale.recipe import Recipe

Sections = dict[str, Any]
BLOCK: Sections = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "dense", "hidden": 32}}
DECODER: Sections = {"kind": "decoder", "width": 32, "stack": {"depth": 4, "block": BLOCK}}
ENCODER: Sections = {**DECODER, "kind": "encoder"}
PAIR: Sections = {
    "kind": "encoder_decoder",
    "width": 32,
    "encoder": {"depth": 2, "block": BLOCK},
    "decoder": {"depth": 2, "block": BLOCK},
}
SENTENCES: Sections = {**ENCODER, "token_types": 2, "sentence_head": {"classes": 2}}
APART: Sections = {"cross_documents": False}
SPLIT: Sections = {**APART, "split_sentences": True, "sequence_length": 32}
DEEPSPEED: Sections = {"mesh": {"dp_shard": 2}, "zero": {"engine": "deepspeed", "stage": 2}}
LABELLED: Sections = {**APART, "source": {"kind": "stdlib_labelled"}}


def encoder(**block: Any) -> Sections:
    """A model of kind encoder whose blocks have other parts."""
    return {**ENCODER, "stack": {"depth": 4, "block": {**BLOCK, **block}}}


def decoder(stack: Sections | None = None, **block: Any) -> Sections:
    """A decoder whose stack, or whose blocks, have other parts."""
    return {**DECODER, "stack": {"depth": 4, "block": {**BLOCK, **block}, **(stack or {})}}


REFUSALS: dict[str, tuple[str, Sections, int]] = {
    "an objective for an encoder": ("objective_goes_with_model", {"objective": {"kind": "masked"}}, 1),
    "an objective with a source": ("objective_goes_with_model", {"objective": {"kind": "span"}}, 1),
    "a causal model without a source": ("objective_goes_with_model", {"model": PAIR}, 1),
    "the first token of a decoder": (
        "objective_reads_the_right_token",
        {"objective": {"kind": "classify", "classes": 3}, "data": LABELLED},
        1,
    ),
    "pairs across documents": (
        "objective_needs_are_met",
        {
            "model": PAIR,
            "objective": {"kind": "seq2seq"},
            "data": {"source": {"kind": "stdlib_pairs"}, "cross_documents": True},
        },
        1,
    ),
    "cpc with DeepSpeed": (
        "objective_needs_are_met",
        {
            "model": {**ENCODER, "global_tokens": 4},
            "objective": {"kind": "cpc", "sentence_length": 8},
            "data": {"sequence_length": 32},
            "parallel": DEEPSPEED,
        },
        2,
    ),
    "texts for labels": (
        "documents_are_of_the_objective",
        {"model": ENCODER, "objective": {"kind": "classify"}, "data": APART},
        1,
    ),
    "pairs for texts": ("documents_are_of_the_objective", {"data": {"source": {"kind": "stdlib_pairs"}}}, 1),
    "labels of another kind": (
        "labels_are_of_the_objective",
        {"model": ENCODER, "objective": {"kind": "regress"}, "data": LABELLED},
        1,
    ),
    "classes of another number": (
        "classes_are_those_of_the_data",
        {"model": ENCODER, "objective": {"kind": "classify", "classes": 7}, "data": LABELLED},
        1,
    ),
    "a length of pairs": ("lengths_are_of_pairs", {"data": {"max_source_length": 9}}, 1),
    "a source that is too long": (
        "lengths_are_of_pairs",
        {
            "model": PAIR,
            "objective": {"kind": "seq2seq"},
            "data": {**APART, "source": {"kind": "stdlib_pairs"}, "sequence_length": 16, "max_source_length": 64},
        },
        1,
    ),
    "BLEU of packed text": ("bleu_is_of_pairs", {"train": {"bleu_pairs": 4}}, 1),
    "a source of a token": (
        "samples_have_their_tokens",
        {
            "model": PAIR,
            "objective": {"kind": "seq2seq"},
            "data": {**APART, "source": {"kind": "stdlib_pairs"}, "sequence_length": 1},
        },
        1,
    ),
    "labels that are split anew": (
        "only_packed_text_is_split_anew",
        {
            "model": ENCODER,
            "objective": {"kind": "classify", "classes": 3},
            "data": LABELLED,
            "run": {"allow_changed": ("data.sequence_length", "train.batch_size")},
        },
        1,
    ),
    "sentences across documents": (
        "objective_needs_are_met",
        {"model": SENTENCES, "objective": {"kind": "masked_sentences"}, "data": {**SPLIT, "cross_documents": True}},
        1,
    ),
    "text without sentences": (
        "text_is_split_for_sentences",
        {"model": SENTENCES, "objective": {"kind": "masked_sentences"}, "data": {**SPLIT, "split_sentences": False}},
        1,
    ),
    "sentences for nothing": ("text_is_split_for_sentences", {"data": {"split_sentences": True}}, 1),
    "sentences of four tokens": (
        "samples_have_their_tokens",
        {"model": SENTENCES, "objective": {"kind": "masked_sentences"}, "data": {**SPLIT, "sequence_length": 4}},
        1,
    ),
    "sentences without a head": (
        "sentence_head_has_the_classes",
        {
            "model": {**SENTENCES, "sentence_head": None},
            "objective": {"kind": "masked_sentences"},
            "data": SPLIT,
        },
        1,
    ),
    "a head of other classes": (
        "sentence_head_has_the_classes",
        {"model": SENTENCES, "objective": {"kind": "masked_sentences", "task": "three_way"}, "data": SPLIT},
        1,
    ),
    "a head for no sentences": (
        "sentence_head_has_the_classes",
        {"model": SENTENCES, "objective": {"kind": "masked"}},
        1,
    ),
    "one token type": (
        "token_types_tell_texts_apart",
        {"model": {**SENTENCES, "token_types": 1}, "objective": {"kind": "masked_sentences"}, "data": SPLIT},
        1,
    ),
    "types of pairs": (
        "token_types_tell_texts_apart",
        {"model": ENCODER, "objective": {"kind": "classify", "classes": 3, "pair_types": True}, "data": LABELLED},
        1,
    ),
    "too few global tokens": (
        "sentences_have_global_tokens",
        {"model": ENCODER, "objective": {"kind": "cpc", "sentence_length": 8}, "data": {"sequence_length": 32}},
        1,
    ),
    "two sequences of two streams": (
        "stages_can_run_it_twice",
        {
            "model": {**encoder(residual="reversible"), "global_tokens": 4},
            "objective": {"kind": "cpc", "sentence_length": 8},
            "data": {"sequence_length": 32},
            "parallel": {"mesh": {"pp": 2}},
        },
        2,
    ),
    "spans without a head": (
        "boundary_head_knows_the_spans",
        {"model": ENCODER, "objective": {"kind": "span_boundary"}},
        1,
    ),
    "a head for shorter spans": (
        "boundary_head_knows_the_spans",
        {"model": {**ENCODER, "boundary_head": {"max_span": 3}}, "objective": {"kind": "span_boundary"}},
        1,
    ),
    "a head for no spans": (
        "boundary_head_knows_the_spans",
        {"model": {**ENCODER, "boundary_head": {"max_span": 3}}, "objective": {"kind": "masked"}},
        1,
    ),
    "no lengths of targets": (
        "length_head_is_trained",
        {"model": PAIR, "objective": {"kind": "disco"}, "data": {**APART, "source": {"kind": "stdlib_pairs"}}},
        1,
    ),
    "a mixer for documents": (
        "documents_are_apart",
        {"model": encoder(mixer={"kind": "fourier"}), "objective": {"kind": "masked"}, "data": APART},
        1,
    ),
    "a core for documents": (
        "documents_are_apart",
        {
            "model": encoder(mixer={"kind": "attention", "heads": 4, "core": {"kind": "linformer"}}),
            "objective": {"kind": "masked"},
            "data": APART,
        },
        1,
    ),
    "a mixer for a prefix": (
        "prefix_is_seen",
        {"model": decoder(mixer={"kind": "s4"}), "objective": {"kind": "prefix_lm"}},
        1,
    ),
    "a prefix on a ring": (
        "prefix_is_seen",
        {
            "model": DECODER,
            "objective": {"kind": "prefix_lm"},
            "parallel": {"mesh": {"cp": 2}, "context": {"style": "ring"}},
        },
        2,
    ),
    "exits beside classes": (
        "heads_predict_what_labels_tell",
        {
            "model": {**ENCODER, "stack": {**ENCODER["stack"], "exits": {}}},
            "objective": {"kind": "classify", "classes": 3},
            "data": LABELLED,
        },
        1,
    ),
    "an optimizer of matrices": (
        "engine_can_shard_the_optimizer",
        {"optimizer": {"kind": "muon"}, "parallel": DEEPSPEED},
        2,
    ),
    "groups with DeepSpeed": (
        "engine_knows_the_groups",
        {"optimizer": {"kind": "adamw", "groups": [{"match": "*"}]}, "parallel": DEEPSPEED},
        2,
    ),
    "an average with DeepSpeed": ("weights_have_one_average", {"train": {"ema_decay": 0.9}, "parallel": DEEPSPEED}, 2),
    "two averages": (
        "weights_have_one_average",
        {
            "train": {"ema_decay": 0.9},
            "optimizer": {"kind": "schedule_free_adamw"},
            "schedule": {"kind": "constant"},
        },
        1,
    ),
    "a schedule beside an average": (
        "averaged_weights_are_of_all_steps",
        {"optimizer": {"kind": "schedule_free_adamw"}, "schedule": {"kind": "cosine"}},
        1,
    ),
    "an average of frozen steps": (
        "averaged_weights_are_of_all_steps",
        {
            "optimizer": {"kind": "schedule_free_adamw", "groups": [{"match": "*", "since": 0.5}]},
            "schedule": {"kind": "constant"},
        },
        1,
    ),
    "muP without a rule": (
        "learning_rates_go_by_the_width",
        {"model": {**DECODER, "mup": {"base_width": 16}}, "optimizer": {"kind": "adafactor"}},
        1,
    ),
    "frozen weights of a split backward": (
        "frozen_weights_need_no_gradient",
        {"train": {"freeze": ["embed.*"]}, "parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}},
        2,
    ),
    "nothing to train": ("parameters_are_trained", {"train": {"freeze": ["*"]}}, 1),
    "weights for DeepSpeed": ("engine_reads_initial_weights", {"init": {"from": "nowhere"}, "parallel": DEEPSPEED}, 2),
    "halting on stages": (
        "needs_of_modules_are_met",
        {"model": decoder({"halting": {}, "share": "all"}), "parallel": {"mesh": {"pp": 2}}},
        2,
    ),
    "halting on shards": (
        "needs_of_modules_are_met",
        {"model": decoder({"halting": {}, "share": "all"}), "parallel": {"mesh": {"cp": 2}}},
        2,
    ),
    "windows on shards": (
        "needs_of_modules_are_met",
        {
            "model": {**ENCODER, "stack": {"depth": 4, "block": BLOCK, "pooling": {"before": (2,)}}},
            "objective": {"kind": "classify", "classes": 3},
            "data": LABELLED,
            "parallel": {"mesh": {"cp": 2}},
        },
        2,
    ),
    "gains with DeepSpeed": (
        "needs_of_modules_are_met",
        {"model": decoder(placement="admin"), "parallel": DEEPSPEED},
        2,
    ),
    "a pipeline with more stages than blocks": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 8}}},
        8,
    ),
    "two stages of one rank": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 1}}},
        2,
    ),
    "blocks that are not split": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"blocks_per_stage": (3, 3)}}},
        2,
    ),
    "a split backward of compiled blocks": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "compile": True}},
        2,
    ),
    "a split backward of shards": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "zbv"}, "zero": {"stage": 3}}},
        4,
    ),
    "a split backward that recomputes": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "recompute": {"every": 1}}},
        2,
    ),
    "heads that tp does not divide": (
        "tensor can be applied to the model",
        {"parallel": {"mesh": {"tp": 3}}},
        3,
    ),
    "a core that mixes heads on tp": (
        "tensor can be applied to the model",
        {
            "model": decoder(mixer={"kind": "attention", "heads": 4, "core": {"kind": "talking_heads"}}),
            "parallel": {"mesh": {"tp": 2}},
        },
        2,
    ),
    "a mixer without heads on tp": (
        "tensor can be applied to the model",
        {
            "model": encoder(mixer={"kind": "fourier"}),
            "objective": {"kind": "masked"},
            "parallel": {"mesh": {"tp": 2}},
        },
        2,
    ),
    "a mixer without a style": (
        "context can be applied to the model",
        {
            "model": encoder(mixer={"kind": "fourier"}),
            "objective": {"kind": "masked"},
            "parallel": {"mesh": {"cp": 2}},
        },
        2,
    ),
    "prefetch at stage 2": (
        "zero can be configured so",
        {"parallel": {"mesh": {"dp_shard": 2}, "zero": {"stage": 2, "prefetch": 1}}},
        2,
    ),
    "DeepSpeed at stage 0": (
        "zero can be configured so",
        {"parallel": {**DEEPSPEED, "zero": {"engine": "deepspeed", "stage": 0}}},
        2,
    ),
    "DeepSpeed in float64": (
        "zero can be configured so",
        {"parallel": DEEPSPEED, "precision": {"compute": "float64", "master": "float64"}},
        2,
    ),
    "torch that offloads": ("zero can be configured so", {"parallel": {"zero": {"offload": {"optimizer": "cpu"}}}}, 1),
    "selective recomputation of nothing": (
        "activation checkpointing can be configured so",
        {"parallel": {"recompute": {"granularity": "selective"}}},
        1,
    ),
    "offloaded inputs of nothing": (
        "activation checkpointing can be configured so",
        {"parallel": {"recompute": {"offload": True}}},
        1,
    ),
    "reversible blocks that recompute": (
        "activation checkpointing can be applied to the model",
        {"model": decoder(residual="reversible"), "parallel": {"recompute": {"every": 1}}},
        1,
    ),
    "experts that there are none of": (
        "expert can be applied to the model",
        {"parallel": {"mesh": {"dp_shard": 2, "ep": 2}}},
        2,
    ),
    "experts that ep does not divide": (
        "expert can be applied to the model",
        {
            "model": decoder(ffn={"kind": "moe", "experts": 4}),
            "parallel": {"mesh": {"dp_shard": 3, "ep": 3}},
            "train": {"batch_size": 6},
        },
        3,
    ),
    "a scaled loss of bfloat16": (
        "precision can be configured so",
        {"precision": {"compute": "bfloat16", "loss_scale": {"initial": 1024.0}}},
        1,
    ),
    "a float8 kernel for nothing": (
        "float8 can be applied to the model",
        {"precision": {"float8_kernel": "emulated"}},
        1,
    ),
    "float8 of float32": ("float8 can be applied to the model", {"precision": {"float8": "tensor"}}, 1),
    "an interleaved schedule of odd micro-batches": (
        "schedule_has_its_micro_batches",
        {
            "parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}},
            "train": {"batch_size": 6, "micro_batch_size": 2},
        },
        2,
    ),
    "a batch that does not divide": (
        "micro_batches_divide_the_batch",
        {"train": {"batch_size": 6, "micro_batch_size": 4}},
        1,
    ),
    "a batch of too few": (
        "micro_batches_divide_the_batch",
        {"train": {"batch_size": 3, "micro_batch_size": 1}, "parallel": {"mesh": {"dp_shard": 2}}},
        2,
    ),
}
"""Name -> the requirement that is not met, the sections that are laid over the small recipe, and the ranks."""


def refused(name: str) -> tuple[Recipe, int]:
    """Return the recipe of a refusal, and its ranks."""
    _, sections, world = REFUSALS[name]
    data: Sections = {
        "model": DECODER,
        "objective": {"kind": "causal"},
        "data": {"source": {"kind": "stdlib"}, "tokenizer": {"kind": "byte"}, "sequence_length": 32},
        "train": {"steps": 4, "batch_size": 8, "micro_batch_size": 2},
        "schedule": {"kind": "constant"},
    }
    for section, values in sections.items():
        is_whole = "kind" in values
        data[section] = values if is_whole else {**data.get(section, {}), **values}
    return decode(Recipe, data), world
