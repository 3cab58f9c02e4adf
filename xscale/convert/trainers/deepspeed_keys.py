"""DeepSpeed's JSON: it has the batch, the optimizer and ZeRO, and no model."""

from xscale.convert.trainers.key_table import DerivedKey, KeyEntry, TrainerTable

ZERO = "zero_optimization"
ADAM = "optimizer.params"
OFFLOADED = {
    "cpu": {"parallel.zero.engine": "deepspeed"},
    "nvme": {"parallel.zero.engine": "deepspeed"},
}
AUTOMATIC = "chosen by itself; parallel.zero.engine=deepspeed has DeepSpeed's defaults"


def _offload(of: str) -> dict[str, dict[str, str]]:
    return {
        "none": {},
        **{
            device: {**settings, f"parallel.zero.offload.{of}": device}
            for device, settings in OFFLOADED.items()
        },
    }


DEEPSPEED = TrainerTable(
    name="DeepSpeed",
    file="a JSON of DeepSpeed",
    suffixes=(".json",),
    sections=True,
    entries=(
        KeyEntry("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        KeyEntry(
            "train_micro_batch_size_per_gpu",
            "train.batch_size",
            "times",
            ("gradient_accumulation_steps",),
        ),
        KeyEntry("train_batch_size", "train.batch_size"),
        KeyEntry(
            "gradient_accumulation_steps", values={}, instead="it follows from the batch sizes"
        ),
        KeyEntry("gradient_clipping", "train.clip_grad_norm", "0 is null"),
        KeyEntry("steps_per_print", "observe.every_steps"),
        KeyEntry("wall_clock_breakdown", instead="observe.profile"),
        KeyEntry(
            "optimizer.type",
            values={
                "adam": {"optimizer.kind": "adamw"},
                "adamw": {"optimizer.kind": "adamw"},
                "lion": {"optimizer.kind": "lion"},
                "muon": {"optimizer.kind": "muon"},
            },
        ),
        KeyEntry(f"{ADAM}.lr", "optimizer.lr"),
        KeyEntry(f"{ADAM}.betas", "optimizer.beta1", "first of two"),
        KeyEntry(f"{ADAM}.betas", "optimizer.beta2", "second of two"),
        KeyEntry(f"{ADAM}.eps", "optimizer.eps", needs={"optimizer.kind": ("adamw", "muon")}),
        KeyEntry(f"{ADAM}.weight_decay", "optimizer.weight_decay"),
        KeyEntry(f"{ADAM}.torch_adam", instead="fused where a kernel can"),
        KeyEntry(f"{ADAM}.adam_w_mode", instead="weight decay is decoupled"),
        KeyEntry(
            "scheduler.type",
            values={
                "warmuplr": {"schedule.kind": "constant"},
                "warmupdecaylr": {"schedule.kind": "wsd"},
                "warmupcosinelr": {"schedule.kind": "cosine"},
            },
        ),
        KeyEntry("scheduler.params.warmup_num_steps", "schedule.warmup_steps"),
        KeyEntry("scheduler.params.total_num_steps", "train.steps"),
        KeyEntry(
            "scheduler.params.cos_min_ratio",
            "schedule.min_lr_ratio",
            needs={"schedule.kind": ("cosine",)},
        ),
        KeyEntry("scheduler.params.warmup_max_lr", "optimizer.lr"),
        KeyEntry("scheduler.params.warmup_min_lr", instead="the warm-up begins at 0"),
        KeyEntry("scheduler.params.warmup_type", instead="the warm-up is linear"),
        KeyEntry("bf16.enabled", values={"true": {"precision.compute": "bfloat16"}, "false": {}}),
        KeyEntry("fp16.enabled", values={"true": {"precision.compute": "float16"}, "false": {}}),
        KeyEntry("fp16.loss_scale", instead="precision.loss_scale"),
        KeyEntry("fp16.initial_scale_power", instead="precision.loss_scale"),
        KeyEntry("fp16.loss_scale_window", instead="precision.loss_scale"),
        KeyEntry("fp16.hysteresis", instead="precision.loss_scale"),
        KeyEntry("fp16.min_loss_scale", instead="precision.loss_scale"),
        KeyEntry(f"{ZERO}.stage", "parallel.zero.stage"),
        KeyEntry(f"{ZERO}.offload_optimizer.device", values=_offload("optimizer")),
        KeyEntry(f"{ZERO}.offload_param.device", values=_offload("parameters")),
        KeyEntry(f"{ZERO}.offload_optimizer.nvme_path", "parallel.zero.offload.folder"),
        KeyEntry(f"{ZERO}.offload_optimizer.pin_memory", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.offload_param.pin_memory", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.overlap_comm", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.contiguous_gradients", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.reduce_scatter", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.reduce_bucket_size", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.allgather_bucket_size", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.allgather_partitions", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.stage3_prefetch_bucket_size", instead="parallel.zero.prefetch"),
        KeyEntry(f"{ZERO}.stage3_param_persistence_threshold", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.stage3_max_live_parameters", instead=AUTOMATIC),
        KeyEntry(f"{ZERO}.stage3_max_reuse_distance", instead=AUTOMATIC),
        KeyEntry(
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
            instead="checkpoints are sharded; `xscale checkpoint export` gathers them",
        ),
        KeyEntry("tensor_parallel.autotp_size", "parallel.mesh.tp"),
        KeyEntry("tensorboard.enabled", "observe.tensorboard"),
        KeyEntry("wandb.enabled", "observe.wandb"),
        KeyEntry("wandb.project", "observe.wandb_project"),
        KeyEntry("activation_checkpointing.partition_activations", instead="parallel.recompute"),
        KeyEntry(
            "activation_checkpointing.cpu_checkpointing", instead="parallel.recompute.offload"
        ),
    ),
    derived=(
        DerivedKey(
            "schedule.decay_steps",
            "less",
            ("train.steps", "schedule.warmup_steps"),
            needs={"schedule.kind": ("wsd",)},
        ),
    ),
    defaults={
        f"{ZERO}.stage": 0,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        f"{ADAM}.betas": [0.9, 0.999],
    },
    can="Training of any PyTorch model; one-bit optimizers; ZeRO++.",
    cannot="The model, the data and the loop: xscale has them, and uses DeepSpeed as an engine where it is to offload.",
)
