"""The table of refused layouts, of students and of their teachers; see `refusals`."""

from tests.requirements.sections import APART, BLOCK, DEEPSPEED, ENCODER, LABELLED, PAIR, Sections, decoder, encoder

OBSERVING: Sections = {
    "model": {**PAIR, "kind": "disentangled", "length_head": {}},
    "objective": {"kind": "disco"},
    "data": {**APART, "source": {"kind": "stdlib_pairs"}},
}
"""A decoder each of whose tokens observes others of its own choice."""
LAYOUTS: dict[str, tuple[str, Sections, int]] = {
    "diversity of exits on stages": (
        "needs_of_modules_are_met",
        {"model": decoder({"exits": {"diversity": 0.1}}), "parallel": {"mesh": {"pp": 2}}},
        2,
    ),
    "windows on stages": (
        "needs_of_modules_are_met",
        {
            "model": {**ENCODER, "stack": {"depth": 4, "block": BLOCK, "pooling": {"before": (2,)}}},
            "objective": {"kind": "classify", "classes": 3},
            "data": LABELLED,
            "parallel": {"mesh": {"pp": 2}},
        },
        2,
    ),
    "gains with DeepSpeed": (
        "needs_of_modules_are_met",
        {"model": decoder(residual="admin"), "parallel": DEEPSPEED},
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
    "kv_heads that tp does not divide": (
        "tensor can be applied to the model",
        {
            "model": decoder(mixer={"kind": "attention", "heads": 12, "kv_heads": 6, "head_width": 8}),
            "parallel": {"mesh": {"tp": 4}},
        },
        4,
    ),
    "quaternions on tp": (
        "tensor can be applied to the model",
        {"model": decoder({"linear_maps": "quaternion"}), "parallel": {"mesh": {"tp": 2}}},
        2,
    ),
    "blocks of hidden units that tp does not divide": (
        "tensor can be applied to the model",
        {"model": decoder(ffn={"kind": "sparse", "hidden": 32}), "parallel": {"mesh": {"tp": 4}}},
        4,
    ),
    "positions as queries on shards": (
        "tensor can be applied to the model",
        {**OBSERVING, "parallel": {"mesh": {"tp": 2}, "tensor": {"sequence": True}}},
        2,
    ),
    "observed tokens on a ring": (
        "context can be applied to the model",
        {**OBSERVING, "parallel": {"mesh": {"cp": 2}, "context": {"style": "ring"}}},
        2,
    ),
    "observed tokens of odd heads": (
        "context can be applied to the model",
        {**OBSERVING, "parallel": {"mesh": {"cp": 3}}},
        3,
    ),
    "a V of stages with one table": (
        "pipeline can be applied to the model",
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}},
        2,
    ),
    "two stages of a rank that share blocks": (
        "pipeline can be applied to the model",
        {
            "model": decoder({"share": "all"}),
            "parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
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
    "experts by DeepEP in float32": (
        "expert can be applied to the model",
        {
            "model": decoder(ffn={"kind": "moe", "experts": 4}),
            "parallel": {"mesh": {"dp_shard": 2, "ep": 2}, "expert": {"dispatch": "deepep"}},
            "precision": {"compute": "float32"},
        },
        2,
    ),
    "experts by DeepEP that drop out": (
        "expert can be applied to the model",
        {
            "model": decoder(ffn={"kind": "moe", "experts": 4, "expert_dropout": 0.1}),
            "parallel": {"mesh": {"dp_shard": 2, "ep": 2}, "expert": {"dispatch": "deepep"}},
            "precision": {"compute": "bfloat16"},
        },
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
    "narrow master parameters": (
        "precision can be configured so",
        {"precision": {"compute": "float64", "master": "float32"}},
        1,
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
    "a student of nobody": ("distillation_can_be_configured_so", {"distill": {}}, 1),
    "a student that learns nothing": (
        "distillation_can_be_configured_so",
        {"distill": {"teacher": "nowhere", "soft_weight": 0.0, "hard_weight": 0.0}},
        1,
    ),
    "a student's stage of nothing": (
        "distillation_can_be_configured_so",
        {"distill": {"teacher": "nowhere", "inner_until": 0.5}},
        1,
    ),
    "a student of DeepSpeed": (
        "distillation_can_be_configured_so",
        {"distill": {"teacher": "nowhere"}, "parallel": DEEPSPEED},
        2,
    ),
    "a student with padding": (
        "distillation_can_be_configured_so",
        {"model": PAIR, "objective": {"kind": "denoising"}, "distill": {"teacher": "nowhere", "cosine_weight": 1.0}},
        1,
    ),
    "a teacher on other ranks": (
        "distillation_can_be_configured_so",
        {"distill": {"teacher": "nowhere", "tp": 2}},
        1,
    ),
    "a student with exits": (
        "student_can_be_compared",
        {"model": decoder({"exits": {}}), "distill": {"teacher": "nowhere"}},
        1,
    ),
    "a student with two streams": (
        "student_can_be_compared",
        {"model": decoder(residual="reversible"), "distill": {"teacher": "nowhere", "hidden_weight": 1.0}},
        1,
    ),
    "a teacher's batch": (
        "teacher_can_be_trained",
        {"distill": {"train_teacher": {"train": {"batch_size": 7}}}},
        1,
    ),
    "a kernel that is compiled": (
        "kernels_can_be_chosen",
        {"kernels": {"packed_attention": "flash_attn"}, "parallel": {"compile": True}},
        1,
    ),
    "a graph of packed documents": ("graphs_read_whole_sequences", {"parallel": {"cuda_graphs": True}}, 1),
    "a graph of what is recomputed": (
        "compile can be configured so",
        {"parallel": {"cuda_graphs": True, "recompute": {"every": 1}}, "data": {"cross_documents": True}},
        1,
    ),
    "a graph of dropout": (
        "compile can be applied to the model",
        {
            "model": decoder(dropout=0.1),
            "parallel": {"cuda_graphs": True},
            "data": {"cross_documents": True},
        },
        1,
    ),
    "exits that are not frozen": (
        "groups_have_parameters",
        {"model": decoder({"exits": {"two_stage": 0.5, "head": "own"}})},
        1,
    ),
    "a pattern of nothing": ("frozen_patterns_match", {"train": {"freeze": ["stak.*"]}}, 1),
    "LoRA of nothing": ("lora_can_be_added", {"lora": {"match": ["*.qq"]}}, 1),
    "ranks that do not fit": ("mesh_fits_the_ranks", {"parallel": {"mesh": {"tp": 2, "dp_shard": 1}}}, 1),
    "windows across documents": (
        "windows_are_of_the_samples",
        {
            "model": {
                **ENCODER,
                "stack": {"depth": 4, "block": BLOCK, "pooling": {"before": (1,), "decoder_blocks": 2}},
            },
            "objective": {"kind": "masked"},
            "data": APART,
        },
        1,
    ),
}
"""Name -> as in `REFUSALS`."""
