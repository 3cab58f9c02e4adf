"""Small configs of other trainers, as their users have them."""

MEGATRON_SH = r"""#!/bin/bash
# A "small" model; --lr 7 in a comment is none.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=2
SAVE=$1
ARGS=(
    --num-layers 4   # blocks
    --hidden-size 256
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --seq-length 128
    --max-position-embeddings 128
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
TRAINING="
    --micro-batch-size 4
    --global-batch-size 64
    --train-iters 5000
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --clip-grad 0.5
    --bf16
"
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${ARGS[@]} $TRAINING \
    --tensor-model-parallel-size ${TP} --sequence-parallel --use-distributed-optimizer \
    --adam-beta2=0.95 --save $SAVE --data-path my_text_document --no-such-flag
echo done
"""
MEGATRON_YAML = """
ENV_VARS: {NCCL_DEBUG: INFO}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 128
  --num-attention-heads: 4
  --seq-length: 64
  --num-experts: 8
  --moe-router-topk: 2
  --moe-aux-loss-coeff: 0.02
  --moe-shared-expert-intermediate-size: 256
  --moe-grouped-gemm: true
  --swiglu: true
  --moe-ffn-hidden-size: 64
  --expert-model-parallel-size: 2
  --micro-batch-size: 2
  --global-batch-size: 16
  --train-samples: 1600
  --lr-warmup-samples: 160
  --lr: 1e-3
  --lr-decay-style: exponential
"""
TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
min_lr_factor = 0.1
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[checkpoint]
enable = true
interval = 250
[quantize.linear.float8]
filter_fqns = ["output"]
"""
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 110}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "aio": {"block_size": 1048576},
}
TRAINING_ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "max_steps": 1000,
    "warmup_ratio": 0.05,
    "lr_scheduler_type": "cosine",
    "bf16": True,
    "gradient_checkpointing": True,
    "save_total_limit": 2,
    "report_to": ["wandb"],
    "neftune_noise_alpha": 5,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
NANOGPT = """
# a small one
import time
out_dir = 'out-shakespeare'
wandb_log = False
wandb_run_name = 'mini-' + str(time.time())
batch_size = 64
block_size = 256
gradient_accumulation_steps = 5 * 8
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
dataset = 'shakespeare_char'
open('ran', 'w').close()
"""
NANOCHAT = """
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- \\
    --depth=12 --max-seq-len=1024 --device-batch-size=16 --total-batch-size=524288 \\
    --num-iterations=2000 --warmdown-ratio=0.5 --window-pattern="L" --fp8
"""
