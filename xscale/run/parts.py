"""The parts of a run in memory, and the device that it computes on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.data.samples.loader import Corpus
from xscale.measure.flops import Size
from xscale.mesh.environment import RankInfo
from xscale.mesh.flat_shard import FlatShard
from xscale.mesh.mesh import Mesh
from xscale.objective.objective import Objective
from xscale.optim.schedule import Schedule
from xscale.parallel.shard.sharded import ShardedParameter
from xscale.settings.settings import Settings
from xscale.step.batches import MicroBatches
from xscale.step.stepper import Stepper

CARRIED = "segments."
"""Prefix of the names of states between segments in a checkpoint."""


@dataclass(frozen=True)
class RunParts:
    """Everything a run's loop uses."""

    settings: Settings
    mesh: Mesh
    corpus: Corpus
    objective: Objective
    model: nn.Module
    parameters: list[ShardedParameter]
    applied: tuple[str, ...]
    """One line for each step of the parallel plan that did something on this rank."""
    schedule: Schedule
    stepper: Stepper
    training: MicroBatches
    validation: MicroBatches | None
    eval_sequences: int
    """Sequences of one evaluation."""
    token_bytes: Tensor
    """[V] bytes of text each token stands for."""
    model_size: Size
    flops_per_sample: float
    peak: float | None
    """FLOP/s of one device, None when not known."""

    def state_tensors(self) -> dict[str, Tensor | FlatShard]:
        """Every tensor of a checkpoint by name, which a load fills in place: those of the engine, and the states that
        the model keeps of the rows of a batch between segments, of which each data-parallel rank has some."""
        return {**self.stepper.engine.state_tensors(), **_carried_rows(self.training)}

    has_weights: bool = True
    """Whether the parameters have their initial weights; otherwise they wait for a checkpoint."""


def _carried_rows(batches: MicroBatches) -> dict[str, FlatShard]:
    states, rows = batches.states, batches.streams
    if states is None or rows is None:
        return {}
    return {
        f"{CARRIED}{name}": FlatShard(
            tensor.view(-1),
            shape := (rows, *tensor.shape[1:]),
            (0,) * len(shape),
            shape,
            batches.first_row() * math.prod(shape[1:]),
        )
        for name, tensor in states.tensors.items()
    }


def device_of(settings: Settings, rank_info: RankInfo) -> torch.device:
    """The device of this process."""
    wanted = settings.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "run.device", "this machine has no GPU that torch can use", "Use run.device=cpu."
        )
    count = torch.cuda.device_count()
    if count >= rank_info.local_world:
        return torch.device("cuda", rank_info.local_rank)
    if count == 1:
        # Each process sees its own GPU only, as number 0: `srun --gpus-per-task=1` binds them so.
        return torch.device("cuda", 0)
    what = f"{rank_info.local_world} processes run on this machine, and {count} GPUs are visible"
    fix = "Start as many processes as there are GPUs, or let each process see one (srun --gpus-per-task=1)."
    raise ConfigError("run.device", what, fix)
