"""The config given to DeepSpeed: the recipe's settings, with every default that would change the numbers spelt out."""

from typing import Any

from torch import nn

from xscale.parallel.config import ParallelConfig

NEVER = 1 << 40
"""Steps between DeepSpeed's own progress lines; ours are printed instead."""

LARGEST_BUCKET = 500_000_000
"""Elements of a gradient bucket, DeepSpeed's default."""


def bucket_size(parameters: int) -> int:
    """Elements of a gradient bucket: DeepSpeed allocates all of it on the device, for the smallest model too."""
    return min(LARGEST_BUCKET, parameters)


def deepspeed_config(
    model: nn.Module, config: ParallelConfig, micro_batch: int, micro_batches: int, cuda: bool
) -> dict[str, Any]:
    """The config of `deepspeed.initialize`; a rank's step is `micro_batches` of `micro_batch` sequences."""
    offload = config.zero.offload
    # Gains and biases stay replicated: an all-gather of each costs more than its memory.
    vectors = [parameter.numel() for parameter in model.parameters() if parameter.dim() < 2]
    zero: dict[str, Any] = {
        "stage": config.zero.stage,
        "contiguous_gradients": True,
        "overlap_comm": cuda,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_size(
            sum(parameter.numel() for parameter in model.parameters())
        ),
        "stage3_param_persistence_threshold": max(vectors, default=0),
        # These two patch functions of torch.
        "memory_efficient_linear": False,
        "override_module_apply": False,
    }
    places = {"offload_optimizer": offload.optimizer, "offload_param": offload.parameters}
    for key, device in places.items():
        if device != "none":
            zero[key] = {"device": device, "pin_memory": cuda}
            if device == "nvme":
                zero[key]["nvme_path"] = offload.folder
    if offload.parameters == "nvme":
        # Elements of a buffer, which holds one parameter; the default takes 2 GB for the smallest model.
        zero["offload_param"]["buffer_size"] = max(
            parameter.numel() for parameter in model.parameters()
        )
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": zero,
        # The default is 1; our optimizer clips, as on every engine.
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
    }
