"""Bytes of a rank's model states: its shards of parameters, gradients and optimizer states."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from xscale.mesh.axes import Degrees
from xscale.nn.module import parameter_axes

TENSOR_PARALLEL_AXES = {"heads", "kv_heads", "ffn", "vocab"}
"""Parameter axes that tensor parallelism shards."""


@dataclass(frozen=True)
class ModelStateBytes:
    """Model state bytes of one rank, without activations and temporarily gathered parameters."""

    parameters: int
    gradients: int
    """Peak bytes: unsharded during gradient accumulation if the ZeRO stage does not shard gradients."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    model: nn.Module,
    degrees: Degrees,
    stage: int,
    states: float | Mapping[str, float],
    master_bytes: int,
) -> ModelStateBytes:
    """Compute the model state bytes of the rank with the largest shards.

    `states`: optimizer values per element, of each parameter by its name where they differ.

    With `stage` 1 and 2 parameters are sharded too: fully_shard gathers them for a step and frees them afterwards. With
    pipeline stages it is the mean stage's blocks plus everything outside of blocks.
    """
    axes = parameter_axes(model)
    sharded = unsharded = 0
    optimizer = 0.0
    for name, parameter in model.named_parameters():
        expert = "experts" in axes[name] and degrees.ep > 1
        shards = (degrees.ep if expert else 1) * (
            degrees.tp if TENSOR_PARALLEL_AXES & set(axes[name]) else 1
        )
        local = -(-parameter.numel() // (shards * (degrees.pp if _is_split(name) else 1)))
        ranks = (degrees.expert_shard if expert else degrees.dp_shard * degrees.cp) if stage else 1
        unsharded += local
        sharded += -(-local // ranks)
        optimizer += -(-local // ranks) * (
            states.get(name, 0) if isinstance(states, Mapping) else states
        )
    gradients = unsharded if stage < 2 else sharded
    return ModelStateBytes(
        sharded * master_bytes, gradients * master_bytes, round(optimizer * master_bytes)
    )


def _is_split(name: str) -> bool:
    """Whether a parameter is of a block that pipeline stages share out; multi-token prediction is on the last one."""
    return ".blocks." in name and not name.startswith("mtp.")
