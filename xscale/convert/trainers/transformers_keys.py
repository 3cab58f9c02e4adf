"""TrainingArguments of Hugging Face's transformers, as JSON or YAML; the model's config.json is read beside them."""

from xscale.convert.trainers.key_table import DerivedKey, KeyEntry, TrainerTable

ACCUMULATION = ("gradient_accumulation_steps",)
ADAMW = {"optimizer.kind": "adamw"}
NEEDS_STEPS = "a run has train.steps steps; `xscale data stats` says how many epochs they are"

TRANSFORMERS = TrainerTable(
    name="HF Trainer",
    file="a JSON or YAML of transformers' TrainingArguments",
    suffixes=(".json", ".yaml", ".yml"),
    entries=(
        KeyEntry("output_dir", "run.dir"),
        KeyEntry("seed", "run.seed"),
        KeyEntry("per_device_train_batch_size", "train.micro_batch_size"),
        KeyEntry("per_device_train_batch_size", "train.batch_size", "times", ACCUMULATION),
        KeyEntry(
            "gradient_accumulation_steps", values={}, instead="it follows from the batch sizes"
        ),
        KeyEntry("per_device_eval_batch_size", instead="evaluations use train.micro_batch_size"),
        KeyEntry("max_steps", "train.steps", "positive"),
        KeyEntry("num_train_epochs", instead=NEEDS_STEPS),
        KeyEntry("learning_rate", "optimizer.lr"),
        KeyEntry("weight_decay", "optimizer.weight_decay"),
        KeyEntry("adam_beta1", "optimizer.beta1"),
        KeyEntry("adam_beta2", "optimizer.beta2"),
        KeyEntry(
            "adam_epsilon", "optimizer.eps", needs={"optimizer.kind": ("adamw", "adamw_8bit")}
        ),
        KeyEntry("max_grad_norm", "train.clip_grad_norm", "0 is null"),
        KeyEntry(
            "optim",
            values={
                "adamw_torch": ADAMW,
                "adamw_torch_fused": ADAMW,
                "adamw_hf": ADAMW,
                "adafactor": {"optimizer.kind": "adafactor"},
                "adamw_bnb_8bit": {"optimizer.kind": "adamw_8bit"},
                "adamw_8bit": {"optimizer.kind": "adamw_8bit"},
                "lion_32bit": {"optimizer.kind": "lion"},
            },
        ),
        KeyEntry(
            "lr_scheduler_type",
            values={
                "linear": {"schedule.kind": "wsd"},
                "cosine": {"schedule.kind": "cosine"},
                "constant": {"schedule.kind": "constant"},
                "constant_with_warmup": {"schedule.kind": "constant"},
                "inverse_sqrt": {"schedule.kind": "inverse_sqrt"},
            },
        ),
        KeyEntry("warmup_ratio", "schedule.warmup_steps", "fraction of", ("max_steps",)),
        KeyEntry("warmup_steps", "schedule.warmup_steps", "steps or fraction of", ("max_steps",)),
        KeyEntry("bf16", values={"true": {"precision.compute": "bfloat16"}, "false": {}}),
        KeyEntry("fp16", values={"true": {"precision.compute": "float16"}, "false": {}}),
        KeyEntry("tf32", values={"true": {"precision.float32_matmul": "high"}, "false": {}}),
        KeyEntry(
            "gradient_checkpointing",
            values={"true": {"parallel.recompute.every": 1}, "false": {}},
        ),
        KeyEntry("torch_compile", "parallel.compile"),
        KeyEntry("logging_steps", "observe.every_steps", "integer"),
        KeyEntry("save_steps", "checkpoint.every_steps", "integer"),
        KeyEntry("save_total_limit", "checkpoint.keep_last"),
        KeyEntry("eval_steps", "train.eval_every", "integer"),
        KeyEntry("save_strategy", instead="checkpoint.every_steps counts steps"),
        KeyEntry("eval_strategy", instead="train.eval_every counts steps"),
        KeyEntry("evaluation_strategy", instead="train.eval_every counts steps"),
        KeyEntry("logging_strategy", instead="observe.every_steps counts steps"),
        KeyEntry("logging_dir", instead="logs are in the run folder"),
        KeyEntry("report_to", instead="observe.tensorboard, observe.wandb or observe.mlflow"),
        KeyEntry("run_name", instead="run.dir"),
        KeyEntry(
            "dataloader_num_workers", instead="data is prepared before; data.workers tokenise"
        ),
        KeyEntry("fsdp", instead="parallel.zero.stage=3"),
        KeyEntry("fsdp_config", instead="parallel.zero.stage=3"),
        KeyEntry("deepspeed", instead="`xscale init --from` reads that file"),
        KeyEntry("ddp_find_unused_parameters", instead="not needed"),
        KeyEntry(
            "load_best_model_at_end", instead="the newest checkpoint is used; checkpoint.keep_every"
        ),
        KeyEntry("metric_for_best_model", instead="checkpoint.keep_every"),
        KeyEntry("push_to_hub", instead="`xscale checkpoint export` writes the folder to push"),
        KeyEntry("remove_unused_columns", instead="not needed"),
        KeyEntry("group_by_length", instead="texts are packed"),
        KeyEntry("label_smoothing_factor", instead="the objective has label smoothing"),
        KeyEntry("do_train", instead="not needed"),
        KeyEntry("do_eval", instead="train.eval_every=0 for none"),
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
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "max_steps": -1,
        "seed": 42,
        "logging_steps": 500,
        "save_steps": 500,
    },
    fixed={"schedule.min_lr_ratio": 0.0, "checkpoint.keep_last": None},
    can="Trainers of images, speech and preferences; quantised base weights; pushes to a hub.",
    cannot="Tensor, pipeline, context and expert parallelism in one run, pre-training from packed text, exact "
    "resume on another layout.",
)
