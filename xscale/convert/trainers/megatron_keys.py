"""Megatron-LM's arguments (`megatron/training/arguments.py`), in a shell script or in a YAML of them."""

from xscale.convert.trainers.key_table import TORCHRUN, DerivedKey, KeyEntry, TrainerTable

MIXER = "model.stack.block.mixer"
FFN = "model.stack.block.ffn"
NORM = "model.stack.block.norm"
DECAYING = {"schedule.kind": ("cosine", "wsd")}
TOPK = {"moe.router.kind": ("topk",)}
GATED = {"kind": "gated", "gate": "swiglu"}
AUTOMATIC = "chosen by itself"
SOURCE = "data.prepared reads such a .bin/.idx pair, data.blend several by weight"
TOKENIZER = "'data.tokenizer={kind: huggingface, file: tokenizer.json}'"

MODEL = (
    KeyEntry("num_layers", "model.stack.depth"),
    KeyEntry("hidden_size", "model.width"),
    KeyEntry("num_attention_heads", f"{MIXER}.heads"),
    KeyEntry(
        "group_query_attention",
        values={"true": {}, "false": {}},
    ),
    KeyEntry("num_query_groups", f"{MIXER}.kv_heads"),
    KeyEntry("kv_channels", f"{MIXER}.head_width"),
    KeyEntry("ffn_hidden_size", f"{FFN}.hidden"),
    KeyEntry(
        "swiglu",
        values={
            "true": {f"{FFN}.kind": "gated", f"{FFN}.gate": "swiglu"},
            "false": {f"{FFN}.kind": "dense"},
        },
    ),
    KeyEntry("openai_gelu", values={"true": {f"{FFN}.activation": "gelu_tanh"}, "false": {}}),
    KeyEntry("squared_relu", instead="relu is the nearest activation"),
    KeyEntry(
        "normalization",
        values={"layernorm": {f"{NORM}.kind": "layer"}, "rmsnorm": {f"{NORM}.kind": "rms"}},
    ),
    KeyEntry("norm_epsilon", f"{NORM}.eps"),
    KeyEntry(
        "position_embedding_type",
        values={
            "rope": {"model.position.kind": "rope"},
            "learned_absolute": {"model.position.kind": "learned"},
            "none": {"model.position.kind": "none"},
        },
    ),
    KeyEntry("rotary_base", "model.position.base", needs={"model.position.kind": ("rope",)}),
    KeyEntry("rotary_percent", "model.position.fraction", needs={"model.position.kind": ("rope",)}),
    KeyEntry(
        "use_rotary_position_embeddings",
        values={"true": {"model.position.kind": "rope"}, "false": {}},
    ),
    KeyEntry("no_position_embedding", values={"true": {}, "false": {}}),
    KeyEntry("max_position_embeddings", instead="positions reach to data.sequence_length"),
    KeyEntry("untie_embeddings_and_output_weights", "model.tied", "negation"),
    KeyEntry(
        "disable_bias_linear",
        values={
            "true": {f"{FFN}.bias": False, f"{MIXER}.bias": False},
            "false": {f"{FFN}.bias": True, f"{MIXER}.bias": True},
        },
    ),
    KeyEntry("qk_layernorm", values={"true": {f"{MIXER}.qk_norm": "layer"}, "false": {}}),
    KeyEntry("attention_dropout", f"{MIXER}.dropout"),
    KeyEntry("hidden_dropout", "model.dropout"),
    KeyEntry("hidden_dropout", "model.stack.block.dropout"),
    KeyEntry("init_method_std", "model.init_std"),
    KeyEntry("multi_latent_attention", instead="model.stack.block.mixer.kind=mla"),
)
MIXTURE = (
    KeyEntry("num_experts", "moe.experts"),
    KeyEntry("moe_ffn_hidden_size", f"{FFN}.hidden"),
    KeyEntry("moe_router_topk", "moe.router.top_k"),
    KeyEntry(
        "moe_router_load_balancing_type",
        values={
            "aux_loss": {},
            "seq_aux_loss": {"moe.router.balance_over": "sequence"},
            "global_aux_loss": {"moe.router.balance_over": "global_batch"},
            "none": {"moe.router.aux_loss_weight": 0.0},
            "sinkhorn": {"moe.router.kind": "sinkhorn"},
        },
    ),
    KeyEntry("moe_aux_loss_coeff", "moe.router.aux_loss_weight", needs=TOPK),
    KeyEntry("moe_z_loss_coeff", "moe.router.z_loss_weight"),
    KeyEntry("moe_expert_capacity_factor", "moe.capacity_factor"),
    KeyEntry(
        "moe_token_drop_policy",
        values={
            "probs": {"moe.drop_policy": "probability"},
            "position": {"moe.drop_policy": "position"},
        },
    ),
    KeyEntry("moe_router_score_function", "moe.router.score"),
    KeyEntry(
        "moe_router_pre_softmax",
        values={"true": {"moe.router.normalise": False}, "false": {"moe.router.normalise": True}},
        needs=TOPK,
    ),
    KeyEntry("moe_router_topk_scaling_factor", "moe.router.scale", needs=TOPK),
    KeyEntry("moe_router_enable_expert_bias", values={"true": {}, "false": {}}),
    KeyEntry("moe_router_bias_update_rate", "moe.router.bias_update_rate", needs=TOPK),
    KeyEntry("moe_input_jitter_eps", "moe.router.jitter"),
    KeyEntry("moe_shared_expert_intermediate_size", "moe.shared.hidden"),
    KeyEntry("moe_layer_freq", instead="model.stack.rules gives some blocks another ffn"),
    KeyEntry("moe_router_num_groups", instead="moe.router.kind=group_limited"),
    KeyEntry("moe_grouped_gemm", instead=AUTOMATIC),
    KeyEntry("moe_permute_fusion", instead=AUTOMATIC),
    KeyEntry(
        "moe_token_dispatcher_type",
        values={
            "alltoall": {"parallel.expert.dispatch": "all_to_all"},
            "flex": {"parallel.expert.dispatch": "deepep"},
        },
    ),
)
TRAINING = (
    KeyEntry("micro_batch_size", "train.micro_batch_size"),
    KeyEntry("micro_batch_size", "train.batch_size"),
    KeyEntry("global_batch_size", "train.batch_size"),
    KeyEntry(
        "rampup_batch_size",
        instead="the batch size is constant; run.allow_changed lets a resumed run change it",
    ),
    KeyEntry("train_samples", "train.steps", "in units of", ("global_batch_size",)),
    KeyEntry("train_iters", "train.steps"),
    KeyEntry("seq_length", "data.sequence_length"),
    KeyEntry("seed", "run.seed"),
    KeyEntry("save", "run.dir"),
    KeyEntry("save_interval", "checkpoint.every_steps"),
    KeyEntry("load", instead="the same command resumes its run; init.from reads weights"),
    KeyEntry("eval_interval", "train.eval_every"),
    KeyEntry("eval_iters", "train.eval_sequences", "times", ("global_batch_size",)),
    KeyEntry("log_interval", "observe.every_steps"),
    KeyEntry("tensorboard_dir", instead="the run folder has TensorBoard's files"),
    KeyEntry("wandb_project", "observe.wandb_project"),
    KeyEntry("exit_duration_in_mins", instead="the launcher ends a job before its time limit"),
    KeyEntry("data_path", instead=SOURCE),
    KeyEntry("split", instead="data.validation is the fraction held out"),
    KeyEntry("vocab_size", "data.tokenizer.vocabulary"),
    KeyEntry("vocab_file", instead=TOKENIZER),
    KeyEntry("merge_file", instead=TOKENIZER),
    KeyEntry("tokenizer_type", instead="data.tokenizer.kind: sentencepiece, huggingface or byte"),
    KeyEntry("tokenizer_model", instead="data.tokenizer.file"),
    KeyEntry("reset_attention_mask", "data.cross_documents", "negation"),
)
OPTIMIZER = (
    KeyEntry(
        "optimizer",
        values={"adam": {"optimizer.kind": "adamw"}, "muon": {"optimizer.kind": "muon"}},
    ),
    KeyEntry("lr", "optimizer.lr"),
    KeyEntry("weight_decay", "optimizer.weight_decay"),
    KeyEntry("adam_beta1", "optimizer.beta1"),
    KeyEntry("adam_beta2", "optimizer.beta2"),
    KeyEntry("adam_eps", "optimizer.eps"),
    KeyEntry("clip_grad", "train.clip_grad_norm", "0 is null"),
    KeyEntry(
        "lr_decay_style",
        values={
            "cosine": {"schedule.kind": "cosine"},
            "linear": {"schedule.kind": "wsd"},
            "wsd": {"schedule.kind": "wsd"},
            "constant": {"schedule.kind": "constant"},
            "inverse_square_root": {"schedule.kind": "inverse_sqrt"},
        },
    ),
    KeyEntry("lr_warmup_samples", "schedule.warmup_steps", "in units of", ("global_batch_size",)),
    KeyEntry("lr_warmup_fraction", "schedule.warmup_steps", "fraction of", ("train_iters",)),
    KeyEntry("lr_warmup_iters", "schedule.warmup_steps"),
    KeyEntry("lr_wsd_decay_iters", "schedule.decay_steps", needs={"schedule.kind": ("wsd",)}),
    KeyEntry("lr_decay_iters", instead="a schedule ends with train.steps"),
    KeyEntry("min_lr", "schedule.min_lr_ratio", "divided by", ("lr",), needs=DECAYING),
    KeyEntry("bf16", values={"true": {"precision.compute": "bfloat16"}, "false": {}}),
    KeyEntry("fp16", values={"true": {"precision.compute": "float16"}, "false": {}}),
    KeyEntry(
        "fp8_recipe",
        values={
            "tensorwise": {"precision.float8": "tensor"},
            "delayed": {"precision.float8": "tensor"},
            "mxfp8": {"precision.float8": "mx"},
        },
    ),
    KeyEntry("fp8_format", instead="precision.float8 has tensor, row and mx"),
)
PARALLEL = (
    KeyEntry("tensor_model_parallel_size", "parallel.mesh.tp"),
    KeyEntry("pipeline_model_parallel_size", "parallel.mesh.pp"),
    KeyEntry("context_parallel_size", "parallel.mesh.cp"),
    KeyEntry("expert_model_parallel_size", "parallel.mesh.ep"),
    KeyEntry(
        "expert_tensor_parallel_size",
        values={"1": {"parallel.mesh.tp_in_experts": False}},
    ),
    KeyEntry("sequence_parallel", "parallel.tensor.sequence"),
    KeyEntry(
        "num_layers_per_virtual_pipeline_stage",
        "parallel.pipeline.stages_per_rank",
        "virtual stages",
        ("num_layers", "pipeline_model_parallel_size"),
    ),
    KeyEntry(
        "cp_comm_type",
        values={
            "p2p": {"parallel.context.style": "ring"},
            "a2a": {"parallel.context.style": "ulysses"},
        },
    ),
    KeyEntry(
        "use_distributed_optimizer",
        values={"true": {"parallel.zero.stage": 1}, "false": {"parallel.zero.stage": 0}},
    ),
    KeyEntry("use_torch_fsdp2", values={"true": {"parallel.zero.stage": 3}, "false": {}}),
    KeyEntry("use_megatron_fsdp", values={"true": {"parallel.zero.stage": 3}, "false": {}}),
    KeyEntry(
        "recompute_granularity",
        values={
            "full": {"parallel.recompute.every": 1, "parallel.recompute.granularity": "full"},
            "selective": {
                "parallel.recompute.every": 1,
                "parallel.recompute.granularity": "selective",
            },
        },
    ),
    KeyEntry("recompute_method", instead="parallel.recompute.every is the interval of the blocks"),
    KeyEntry(
        "recompute_num_layers", instead="parallel.recompute.every is the interval of the blocks"
    ),
    KeyEntry("overlap_grad_reduce", instead=AUTOMATIC),
    KeyEntry("overlap_param_gather", instead=AUTOMATIC),
    KeyEntry("use_flash_attn", instead=AUTOMATIC),
    KeyEntry("use_mcore_models", instead="there is one implementation"),
    KeyEntry("transformer_impl", instead="there is one implementation"),
    KeyEntry("attention_backend", instead=AUTOMATIC),
    KeyEntry("distributed_backend", instead="NCCL on GPUs, gloo on CPUs"),
    KeyEntry("distributed_timeout_minutes", instead="parallel.timeout_seconds"),
    KeyEntry("use_checkpoint_args", instead="a checkpoint has its config"),
    KeyEntry("ckpt_format", instead="there is one format, which any layout loads"),
)

MEGATRON = TrainerTable(
    name="Megatron-LM",
    file="a shell script with Megatron-LM's arguments, or a YAML of them",
    suffixes=(".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".json"),
    entries=(*MODEL, *MIXTURE, *TRAINING, *OPTIMIZER, *PARALLEL, *TORCHRUN),
    derived=(
        DerivedKey(
            "schedule.decay_steps",
            "less",
            ("train.steps", "schedule.warmup_steps"),
            needs={"schedule.kind": ("wsd",)},
        ),
        DerivedKey(
            f"{FFN}.hidden", "gated hidden", ("model.width",), needs={f"{FFN}.kind": ("gated",)}
        ),
    ),
    defaults={
        "swiglu": False,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "disable_bias_linear": False,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "moe_aux_loss_coeff": 0.0,
        "optimizer": "adam",
        "weight_decay": 0.01,
        "adam_beta2": 0.999,
        "lr_decay_style": "linear",
        "lr_warmup_iters": 0,
        "min_lr": 0.0,
        "reset_attention_mask": False,
        "use_distributed_optimizer": False,
        "seed": 1234,
        "eval_interval": 1000,
        "log_interval": 100,
    },
    fixed={"model.kind": "decoder", f"{MIXER}.kind": "attention", "moe.router.kind": "topk"},
    can="The highest measured throughput of dense GPT models on thousands of GPUs, multimodal models, FP8 parameters, "
    "batch-size ramps.",
    cannot="The attention cores and routers of `xscale list`, one checkpoint for every layout with exact "
    "resume, a plan of memory and time before the queue.",
)
