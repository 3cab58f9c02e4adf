"""Words of other trainers (transformers, Megatron-LM, torchtitan, nanoGPT, DeepSpeed) and what they mean here."""

NAMES_ELSEWHERE = {
    "optimizer.lr": "learning_rate base_lr max_lr",
    "optimizer.weight_decay": "wd weight_decay_rate",
    "optimizer.beta1": "adam_beta1 betas",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "train.clip_grad_norm": "max_grad_norm clip_grad grad_clip gradient_clipping max_norm",
    "train.steps": "max_steps max_iters train_iters total_steps num_steps",
    "train.batch_size": "global_batch_size train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu device_batch_size "
    "local_batch_size",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_iters",
    "schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "schedule.min_lr_ratio": "min_lr lr_min min_lr_rate",
    "train.eval_every": "eval_interval eval_steps eval_freq",
    "checkpoint.every_steps": "save_interval save_steps save_every checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit",
    "observe.every_steps": "log_interval logging_steps log_freq log_every",
    "observe.wandb": "use_wandb",
    "run.dir": "output_dir out_dir save_dir run_name exp_name dump_folder",
    "data.sequence_length": "seq_length seq_len max_seq_len max_length max_seq_length context_length",
    "data.tokenizer.vocabulary": "vocab_size padded_vocab_size",
    "data.tokenizer.file": "tokenizer_path tokenizer_model tokenizer_file vocab_file",
    "data.workers": "num_workers dataloader_num_workers",
    "model.stack.depth": "n_layer n_layers num_layers num_hidden_layers",
    "model.width": "hidden_size hidden_dim d_model n_embd dim embed_dim",
    "model.stack.block.mixer.heads": "num_attention_heads n_head n_heads num_heads",
    "model.stack.block.mixer.kv_heads": "num_key_value_heads num_query_groups n_kv_heads n_kv_head",
    "model.stack.block.ffn.hidden": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying",
    "moe.experts": "num_experts num_local_experts n_experts n_routed_experts",
    "moe.router.top_k": "num_experts_per_tok moe_router_topk experts_per_token",
    "moe.capacity_factor": "moe_capacity_factor expert_capacity_factor moe_expert_capacity_factor",
    "moe.router.aux_loss_weight": "aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff",
    "moe.router.z_loss_weight": "router_z_loss_coef moe_z_loss_coeff",
    "parallel.mesh.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "parallel.mesh.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
    "pipeline_parallel_degree",
    "parallel.mesh.cp": "context_parallel context_parallel_size context_parallel_degree sequence_parallel_size",
    "parallel.mesh.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallel.tensor.sequence": "sequence_parallel",
    "parallel.zero.stage": "zero_stage",
    "precision.compute": "dtype torch_dtype mixed_precision mixed_precision_param",
    "parallel.compile": "torch_compile",
}
"""A key here, or words that name it in each mixture (`moe.experts`) -> its names in other trainers and configs."""
OTHERS_WORDS = {name: key for key, names in NAMES_ELSEWHERE.items() for name in names.split()}

TEXT_FILES = (
    "Write 'data.source={kind: text, paths: [FILES]}'; `xscale list source` has other kinds."
)
WAYS_OF_PATHS = {
    "data": TEXT_FILES,
    **{
        f"{section}{word}": TEXT_FILES
        for section in ("", "data.", "data.source.")
        for word in ("path", "paths", "file", "files", "text")
    },
    **dict.fromkeys(
        ("data.tokenizer.path", "data.tokenizer.model"),
        "Did you mean 'data.tokenizer.file'?",
    ),
}
"""A whole path whose last word means something else elsewhere -> a sentence on what is done here."""
OTHERS_WAYS = {
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs"),
        "A run has train.steps steps; `xscale data stats CONFIG` says how many epochs they are.",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "gradient_accumulation"),
        "It follows from train.batch_size, over all ranks, and train.micro_batch_size, of one rank.",
    ),
    **dict.fromkeys(("bf16", "bfloat16"), "Write precision.compute=bfloat16."),
    **dict.fromkeys(("fp16", "float16", "half"), "Write precision.compute=float16."),
    **dict.fromkeys(("fp32", "float32"), "Write precision.compute=float32."),
    "fp8": "Write precision.float8=tensor; `xscale explain precision.float8` has the other recipes.",
    "fsdp": "Write parallel.zero.stage=3.",
    "ddp": "Write parallel.zero.stage=0.",
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
        "Write parallel.recompute.every=1.",
    ),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "load"),
        "The same command resumes its run; run.fresh=true refuses to.",
    ),
    **dict.fromkeys(
        ("dataset", "dataset_path", "data_path", "data_dir", "train_file", "train_files"),
        TEXT_FILES,
    ),
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_fraction"),
        "Write schedule.warmup_steps=STEPS, a number of steps of the run.",
    ),
    **dict.fromkeys(
        ("config", "config_file"), "The config is no option: `xscale train CONFIG key=value`."
    ),
    "block_size": "Did you mean 'data.sequence_length'?",
    "layers": "Did you mean 'model.stack.depth'?",
    "tp": "Did you mean 'parallel.mesh.tp'?",
    "top_k": "Did you mean 'moe.router.top_k', of a mixture, or 'train.sample.top_k', of samples?",
    **dict.fromkeys(
        ("gpus", "nproc", "nproc_per_node", "num_processes", "ngpus"),
        "`xscale launch local --processes N CONFIG` starts N processes.",
    ),
}
"""A key of other trainers that no single key stands for -> a sentence on what is done here."""

OTHERS_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
"""A value as others write it -> the choice here."""


def meant_by(word: str) -> str:
    """Return the key that is meant by another trainer's word, in any case and with dashes; empty if none is."""
    return OTHERS_WORDS.get(_plain(word), "")


def way_of(path: str) -> str:
    """Return a sentence on what is done here in place of another trainer's key; empty if none is known."""
    path = _plain(path)
    return WAYS_OF_PATHS.get(path, "") or OTHERS_WAYS.get(path.rpartition(".")[2], "")


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
