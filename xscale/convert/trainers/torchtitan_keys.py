"""torchtitan's job configs: TOML with sections, and a model by its name and flavor."""

from xscale.convert.trainers.key_table import DerivedKey, KeyEntry, TrainerTable

MIXER = "model.stack.block.mixer"
FFN = "model.stack.block.ffn"
DECAYING = {"schedule.kind": ("cosine", "wsd")}
RANKS = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)


def _llama3(
    width: int, depth: int, heads: int, kv_heads: int, hidden: int, vocabulary: int = 128256
) -> dict[str, int]:
    return {
        "model.width": width,
        "model.stack.depth": depth,
        f"{MIXER}.heads": heads,
        f"{MIXER}.kv_heads": kv_heads,
        f"{FFN}.hidden": hidden,
        "data.tokenizer.vocabulary": vocabulary,
    }


FLAVORS = {
    "8b": _llama3(4096, 32, 32, 8, 14336),
    "70b": _llama3(8192, 80, 64, 8, 28672),
    "405b": _llama3(16384, 126, 128, 8, 53248),
}
"""Sizes of Llama 3 (Grattafiori et al. 2024, table 3), the models that torchtitan calls so."""

TORCHTITAN = TrainerTable(
    name="torchtitan",
    file="a TOML of torchtitan",
    suffixes=(".toml",),
    sections=True,
    entries=(
        KeyEntry("model.name", values={"llama3": {"model.kind": "decoder"}}),
        KeyEntry("model.flavor", values=FLAVORS, needs={"model.kind": ("decoder",)}),
        KeyEntry("model.hf_assets_path", instead="data.tokenizer.file is its tokenizer.json"),
        KeyEntry("model.tokenizer_path", instead="data.tokenizer.file"),
        KeyEntry("model.converters", instead="precision.float8=tensor, or row"),
        KeyEntry("job.dump_folder", "run.dir"),
        KeyEntry("job.description", instead="a comment in the recipe"),
        KeyEntry("training.local_batch_size", "train.micro_batch_size"),
        KeyEntry("training.local_batch_size", "train.batch_size", "times", RANKS),
        KeyEntry("training.global_batch_size", "train.batch_size", "positive"),
        KeyEntry("training.seq_len", "data.sequence_length"),
        KeyEntry("training.steps", "train.steps"),
        KeyEntry("training.max_norm", "train.clip_grad_norm", "0 is null"),
        KeyEntry("training.seed", "run.seed"),
        KeyEntry("training.dataset", instead="data.source names the text"),
        KeyEntry("training.dataset_path", instead="data.source names the text"),
        KeyEntry("training.mixed_precision_param", "precision.compute"),
        KeyEntry("training.mixed_precision_reduce", instead="gradients are reduced in float32"),
        KeyEntry("training.dtype", "precision.master"),
        KeyEntry("training.compile", "parallel.compile"),
        KeyEntry("training.enable_cpu_offload", instead="parallel.zero.engine=deepspeed offloads"),
        KeyEntry("compile.enable", "parallel.compile"),
        KeyEntry("compile.components", instead="the blocks are compiled"),
        KeyEntry("debug.seed", "run.seed"),
        KeyEntry(
            "optimizer.name",
            values={"adamw": {"optimizer.kind": "adamw"}, "muon": {"optimizer.kind": "muon"}},
        ),
        KeyEntry("optimizer.lr", "optimizer.lr"),
        KeyEntry("optimizer.beta1", "optimizer.beta1"),
        KeyEntry("optimizer.beta2", "optimizer.beta2"),
        KeyEntry("optimizer.eps", "optimizer.eps"),
        KeyEntry("optimizer.weight_decay", "optimizer.weight_decay"),
        KeyEntry("optimizer.implementation", instead="fused where a kernel can"),
        KeyEntry("lr_scheduler.warmup_steps", "schedule.warmup_steps"),
        KeyEntry(
            "lr_scheduler.decay_type",
            values={"linear": {"schedule.kind": "wsd"}, "cosine": {"schedule.kind": "cosine"}},
        ),
        KeyEntry(
            "lr_scheduler.decay_ratio",
            "schedule.decay_steps",
            "fraction of",
            ("training.steps",),
            needs={"schedule.kind": ("wsd",)},
        ),
        KeyEntry("lr_scheduler.min_lr_factor", "schedule.min_lr_ratio", needs=DECAYING),
        KeyEntry("lr_scheduler.lr_min", "schedule.min_lr_ratio", needs=DECAYING),
        KeyEntry("parallelism.data_parallel_replicate_degree", "parallel.mesh.dp_replicate"),
        KeyEntry("parallelism.data_parallel_shard_degree", "parallel.mesh.dp_shard"),
        KeyEntry("parallelism.tensor_parallel_degree", "parallel.mesh.tp"),
        KeyEntry("parallelism.pipeline_parallel_degree", "parallel.mesh.pp"),
        KeyEntry("parallelism.context_parallel_degree", "parallel.mesh.cp"),
        KeyEntry("parallelism.expert_parallel_degree", "parallel.mesh.ep"),
        KeyEntry(
            "parallelism.pipeline_parallel_schedule",
            values={
                "gpipe": {"parallel.pipeline.schedule": "gpipe"},
                "1f1b": {"parallel.pipeline.schedule": "1f1b"},
                "interleaved1f1b": {"parallel.pipeline.schedule": "interleaved_1f1b"},
                "zbvzerobubble": {"parallel.pipeline.schedule": "zbv"},
                "dualpipev": {"parallel.pipeline.schedule": "dualpipe_v"},
            },
        ),
        KeyEntry(
            "parallelism.fsdp_reshard_after_forward",
            values={
                "default": {},
                "always": {"parallel.zero.stage": 3},
                "never": {"parallel.zero.stage": 2},
            },
        ),
        KeyEntry(
            "parallelism.enable_async_tensor_parallel", instead="no asynchronous tensor parallelism"
        ),
        KeyEntry("parallelism.disable_loss_parallel", instead="the loss is sharded with tp"),
        KeyEntry(
            "activation_checkpoint.mode",
            values={
                "none": {"parallel.recompute.every": 0},
                "full": {"parallel.recompute.every": 1, "parallel.recompute.granularity": "full"},
                "selective": {
                    "parallel.recompute.every": 1,
                    "parallel.recompute.granularity": "selective",
                },
            },
        ),
        KeyEntry(
            "activation_checkpoint.selective_ac_option",
            values={"op": {}, "1": {}, "2": {"parallel.recompute.every": 2}},
        ),
        KeyEntry("checkpoint.interval", "checkpoint.every_steps"),
        KeyEntry("checkpoint.keep_latest_k", "checkpoint.keep_last", "0 is null"),
        KeyEntry(
            "checkpoint.async_mode",
            values={
                "disabled": {"checkpoint.asynchronous": False},
                "async": {"checkpoint.asynchronous": True},
                "async_with_pinned_mem": {"checkpoint.asynchronous": True},
            },
        ),
        KeyEntry("checkpoint.enable", values={"true": {}}),
        KeyEntry("checkpoint.enable_checkpoint", values={"true": {}}),
        KeyEntry("checkpoint.folder", instead="checkpoints are in the run folder"),
        KeyEntry("checkpoint.last_save_model_only", instead="each checkpoint is complete"),
        KeyEntry("checkpoint.export_dtype", instead="`xscale checkpoint export` has the dtype"),
        KeyEntry("checkpoint.initial_load_path", instead="init.from"),
        KeyEntry("validation.freq", "train.eval_every"),
        KeyEntry("metrics.log_freq", "observe.every_steps"),
        KeyEntry("metrics.enable_tensorboard", "observe.tensorboard"),
        KeyEntry("metrics.enable_wandb", "observe.wandb"),
        KeyEntry("profiling.enable_profiling", instead="observe.profile"),
        KeyEntry("comm.train_timeout_seconds", "parallel.timeout_seconds"),
        KeyEntry("comm.init_timeout_seconds", "parallel.start_timeout_seconds"),
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
        RANKS[0]: 1,
        RANKS[1]: -1,
        "optimizer.name": "AdamW",
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": "selective",
        "checkpoint.interval": 500,
        "checkpoint.keep_latest_k": 10,
        "metrics.log_freq": 10,
    },
    fixed={
        "model.tied": False,
        "model.position.kind": "rope",
        "model.position.base": 500000.0,
        f"{MIXER}.kind": "attention",
        f"{FFN}.kind": "gated",
        f"{FFN}.gate": "swiglu",
        "model.stack.block.norm.kind": "rms",
        "model.stack.block.norm.eps": 1e-5,
        "parallel.zero.stage": 3,
        "data.cross_documents": True,
    },
    can="Models of other flavors than Llama 3, whose sizes are in its code; asynchronous tensor parallelism; float8 "
    "all-gathers.",
    cannot="Efficient attention cores, routers, objectives beside the next token, exact resume on another layout, "
    "a plan before the queue.",
)
