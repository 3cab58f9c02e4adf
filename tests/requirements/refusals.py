"""The table of refused recipes: what is laid over a small one, the number of ranks, and the requirement that speaks."""

from tests.requirements.layout_refusals import LAYOUTS
from tests.requirements.objective_refusals import OBJECTIVES
from tests.requirements.part_refusals import PARTS
from tests.requirements.sections import (
    APART,
    DECODER,
    DEEPSPEED,
    ENCODER,
    LABELLED,
    PAIR,
    SENTENCES,
    SPLIT,
    Sections,
    decoder,
    encoder,
)
from tests.requirements.stream_refusals import STREAMS
from xscale.core.config import decode
from xscale.recipe import Recipe

REFUSALS: dict[str, tuple[str, Sections, int]] = {
    **LAYOUTS,
    **PARTS,
    **OBJECTIVES,
    **STREAMS,
    "a signal of an odd width": (
        "model_fits_itself",
        {
            "model": {
                **decoder({"step_signal": True}, mixer={"kind": "attention", "heads": 3}),
                "width": 33,
                "position": "learned",
            }
        },
        1,
    ),
    "scores of reversible blocks": (
        "model_fits_itself",
        {
            "model": decoder(
                residual="reversible", mixer={"kind": "attention", "heads": 4, "core": {"kind": "prior_scores"}}
            )
        },
        1,
    ),
    "scores of tokens that halt": (
        "model_fits_itself",
        {
            "model": decoder(
                {"halting": {}, "share": "all"},
                mixer={"kind": "attention", "heads": 4, "core": {"kind": "prior_scores"}},
            )
        },
        1,
    ),
    "exits with statistics of every step": (
        "model_fits_itself",
        {"model": decoder({"exits": {"norm": True}}, norm={"kind": "batch"})},
        1,
    ),
    "versions of texts without choices": ("texts_with_versions_have_choices", {"data": {"dupe_factor": 10}}, 1),
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
    "neighbours of an example at an exit": (
        "heads_predict_what_labels_tell",
        {
            "model": {
                **ENCODER,
                "stack": {
                    **ENCODER["stack"],
                    "exits": {"policy": {"criterion": "uncertainty", "threshold": 0.5, "window": 1}},
                },
            },
            "objective": {"kind": "classify", "classes": 3},
            "data": LABELLED,
        },
        1,
    ),
    "entropy of scores at an exit": (
        "heads_predict_what_labels_tell",
        {
            "model": {
                **ENCODER,
                "stack": {**ENCODER["stack"], "exits": {"policy": {"criterion": "entropy", "threshold": 1.0}}},
            },
            "objective": {"kind": "regress"},
            "data": {**LABELLED, "source": {"kind": "labelled", "paths": ("a.jsonl",), "labels": "score"}},
        },
        1,
    ),
    "a distance of tokens at an exit": (
        "heads_predict_what_labels_tell",
        {
            "model": {
                **ENCODER,
                "stack": {
                    **ENCODER["stack"],
                    "exits": {"policy": {"criterion": "patience", "threshold": 1, "tolerance": 0.1}},
                },
            },
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
