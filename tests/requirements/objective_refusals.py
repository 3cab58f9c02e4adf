"""The table of refused objectives, frozen weights, groups and kernels; see `refusals`."""

from typing import Any

from tests.requirements.sections import ENCODER, LABELLED, PAIR, SENTENCES, SPLIT, Sections, decoder


def objective(kind: str, *, model: Sections = ENCODER, data: Sections | None = None, **values: Any) -> Sections:
    """A model, an encoder if no other is given, with an objective."""
    return {"model": model, "objective": {"kind": kind, **values}, "data": {"cross_documents": True, **(data or {})}}


def classes(**values: Any) -> Sections:
    """An encoder that classifies."""
    return objective("classify", data=LABELLED, classes=12, **values)


SPARSE = decoder(ffn={"kind": "sparse", "hidden": 32})
OBJECTIVES: dict[str, tuple[str, Sections, int]] = {
    "logits of no vocabulary": ("objective_fits_itself", classes(z_loss_weight=0.1), 1),
    "an activation of no layer": ("objective_fits_itself", classes(dense_activation="relu"), 1),
    "smoothed scores": (
        "objective_fits_itself",
        objective(
            "regress",
            data={**LABELLED, "source": {"kind": "labelled", "paths": ("a.jsonl",), "labels": "score"}},
            label_smoothing=0.1,
        ),
        1,
    ),
    "more masks than tokens": ("objective_fits_itself", objective("masked", mask_fraction=0.8, random_fraction=0.3), 1),
    "more predicted tokens than there are": (
        "objective_fits_itself",
        {**objective("masked_sentences", model=SENTENCES, mask_probability=0.7, shuffled_trigrams=0.6), "data": SPLIT},
        1,
    ),
    "no corruption": (
        "objective_fits_itself",
        objective("denoising", model=PAIR, permuted_sentences=0.0, infilled=0.0),
        1,
    ),
    "short spans": (
        "objective_fits_itself",
        objective("ul2", model=PAIR, denoisers=({"mode": "R", "noise_density": 0.5, "mean_length": 1},)),
        1,
    ),
    "a pattern of no parameter": ("frozen_patterns_match", {"train": {"freeze": ["embd.*"]}}, 1),
    "LoRA of no map": ("lora_can_be_added", {"lora": {"match": ["*.querie"]}}, 1),
    "LoRA of blocks of hidden units": ("lora_can_be_added", {"model": SPARSE, "lora": {"match": ["*.q", "*.up"]}}, 1),
    "LoRA of the head": (
        "lora_can_be_added",
        {"model": ENCODER, **classes(dense=True), "lora": {"match": ["*.q", "head.*"]}},
        1,
    ),
    "LoRA of replicated keys": (
        "lora_can_be_added",
        {
            "model": decoder(mixer={"kind": "attention", "heads": 4, "kv_heads": 1}),
            "lora": {"match": ["*.q", "*.k"]},
            "parallel": {"mesh": {"tp": 2}},
        },
        2,
    ),
    "dropout of sharded channels": (
        "lora_can_be_added",
        {"lora": {"match": ["*.q", "*.o"], "dropout": 0.1}, "parallel": {"mesh": {"tp": 2}}},
        2,
    ),
    "a group of nothing": (
        "groups_have_parameters",
        {"optimizer": {"kind": "adamw", "groups": [{"match": "embd.*"}]}},
        1,
    ),
    "a group behind one that has all": (
        "groups_have_parameters",
        {"optimizer": {"kind": "adamw", "groups": [{"match": "*"}, {"match": "embed.*", "lr_factor": 0.1}]}},
        1,
    ),
    "a kernel that there is not": ("kernels_can_be_chosen", {"kernels": {"packed_attention": "flash"}}, 1),
    "tasks of an encoder": (
        "tasks_can_be_evaluated",
        {**objective("masked"), "train": {"tasks": {"names": ("lambada",)}}},
        1,
    ),
    "inputs that nobody gathers": (
        "activation checkpointing can be configured so",
        {"parallel": {"recompute": {"regather_sequence_parallel_input": True}}},
        1,
    ),
    "dropped weights that no style shards": (
        "context can be applied to the model",
        {
            "model": decoder(mixer={"kind": "attention", "heads": 4, "dropout": 0.1}),
            "parallel": {"mesh": {"cp": 2}, "context": {"style": "ring"}},
        },
        2,
    ),
    "dropped weights of heads that cp does not divide": (
        "context can be applied to the model",
        {
            "model": decoder(mixer={"kind": "attention", "heads": 4, "dropout": 0.1}),
            "parallel": {"mesh": {"cp": 3}},
        },
        3,
    ),
    "norms over key heads on tp": (
        "tensor can be applied to the model",
        {
            "model": decoder(
                mixer={"kind": "attention", "heads": 4, "kv_heads": 1, "qk_norm": "rms", "qk_norm_over": "heads"}
            ),
            "parallel": {"mesh": {"tp": 2}},
        },
        2,
    ),
}
"""Name -> as in `REFUSALS`."""
