"""Bytes that a rank keeps from step to step: its parts of parameters, gradients and optimizer states."""

from dataclasses import dataclass

from torch import nn

from xscale.mesh.axes import Degrees
from xscale.nn.module import parameter_axes

SPREAD = {"heads", "kv_heads", "ffn", "vocab"}
"""Axes of parameters that tensor parallelism cuts."""


@dataclass(frozen=True)
class Memory:
    """Bytes at rest on one rank; activations and what is gathered for a moment come on top."""

    parameters: int
    gradients: int
    """At their most: whole over the micro-batches of a step where the stage keeps them so."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def at_rest(model: nn.Module, degrees: Degrees, stage: int, states: int, master_bytes: int) -> Memory:
    """What one rank of the largest share keeps. `states` is the optimizer's values for each parameter.

    With `stage` 1 and 2 the parameters rest in parts too: fully_shard gathers them for a step and lets them go. With
    pipeline stages it is the mean stage's blocks, and all that stands outside blocks.
    """
    axes = parameter_axes(model)
    own = whole = 0
    for name, parameter in model.named_parameters():
        expert = "experts" in axes[name] and degrees.ep > 1
        cuts = (degrees.ep if expert else 1) * (degrees.tp if SPREAD & set(axes[name]) else 1)
        here = -(-parameter.numel() // (cuts * (degrees.pp if ".blocks." in name else 1)))
        among = (degrees.expert_shard if expert else degrees.dp_shard * degrees.cp) if stage else 1
        whole += here
        own += -(-here // among)
    gradients = whole if stage < 2 else own
    return Memory(own * master_bytes, gradients * master_bytes, own * states * master_bytes)
