"""DeepSpeed engine (Rasley et al. 2020): the only file that imports DeepSpeed.

DeepSpeed shards states, reduces gradients and offloads (Ren et al. 2021; Rajbhandari et al. 2021). Loss, clipping, the
update itself and checkpoints are ours, so that a step gives the numbers of any other engine.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from xscale.mesh.collectives import sum_scalars
from xscale.mesh.environment import set_deepspeed_accelerator
from xscale.mesh.flat_shard import FlatShard
from xscale.mesh.mesh import Mesh
from xscale.nn.blocks.block import Block
from xscale.nn.module import parameter_decays
from xscale.parallel.config import ParallelConfig
from xscale.parallel.engine.deepspeed.optimizer import Build, FlatOptimizer, flat_states
from xscale.parallel.engine.deepspeed.partition import (
    PackedPartition,
    ParameterSpan,
    Partition,
    SlicedPartition,
)
from xscale.parallel.engine.deepspeed.settings import deepspeed_config
from xscale.parallel.shard.sharded import local_shape_and_offset


@dataclass(frozen=True)
class ProcessGroups:
    """An `mpu` over our mesh; the names of the methods are DeepSpeed's."""

    data: dist.ProcessGroup
    model: dist.ProcessGroup

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return self.model.size()

    def get_model_parallel_rank(self) -> int:
        return self.model.rank()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.model.size()

    def get_tensor_model_parallel_rank(self) -> int:
        return self.model.rank()

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self.model)[0]


def groups_of(dense: DeviceMesh) -> ProcessGroups:
    """Groups of the dense mesh: states are sharded over dp_shard, which contains cp."""
    return ProcessGroups(dense["dp_shard"].get_group(), dense["tp"].get_group())


class DeepSpeedEngine:
    """The engine (see `protocol.Engine`) of a model whose parameters `make_plain` has localised. Collective."""

    ema: None = None
    """There is no moving average of the weights."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: ParallelConfig,
        build: Build,
        *,
        clip_grad_norm: float | None,
        micro_batch: int,
        micro_batches: int,
    ) -> None:
        """`build` makes the optimizer of a flat tensor; a rank's step is `micro_batches` of `micro_batch` sequences."""
        model_decays = parameter_decays(model)
        assert mesh.dense is not None, "DeepSpeed shards over several processes"
        self.groups = groups_of(mesh.dense)
        self.device, self.repeats = mesh.device, mesh.degrees.tp
        self.parameters = dict(model.named_parameters())
        self.boxes = {name: _box(parameter) for name, parameter in self.parameters.items()}
        trained = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        param_groups: list[dict[str, Any]] = [
            {
                "params": [
                    value for name, value in trained.items() if model_decays[name] is decays
                ],
                "decays": decays,
            }
            for decays in (True, False)
        ]
        param_groups = [group for group in param_groups if group["params"]]
        # DeepSpeed averages gradients over the data-parallel ranks; ours are sums, also those of auxiliary losses.
        self.optimizer = FlatOptimizer(
            param_groups, build, clip_grad_norm, scale=self.groups.data.size()
        )
        cuda = mesh.device.type == "cuda"
        ds_config = deepspeed_config(model, config, micro_batch, micro_batches, cuda)
        self.engine = _initialize(model, self.optimizer, self.groups, ds_config, cuda)
        zero = self.engine.optimizer
        self.partition: Partition = (
            SlicedPartition(zero) if config.zero.stage == 3 else PackedPartition(zero)
        )
        self.spans = {name: self.partition.span(parameter) for name, parameter in trained.items()}
        self.decays = [group["decays"] for group in self.optimizer.param_groups]
        for number in range(len(self.partition.flats)):
            with self.partition.fetched(number):
                self._states(number)
        self.staged: dict[int, dict[str, Tensor]] = {}
        """Copies of states on a disk: number of the flat partition -> kind of state -> values."""
        self.last = True

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.engine
        return model

    def begin_micro_batch(self, *, last: bool) -> None:
        self.last = last
        self.engine.set_gradient_accumulation_boundary(last)

    def group_norms(self) -> dict[str, float]:
        """Return nothing: there are no parameter groups."""
        return {}

    def set_progress(self, progress: float) -> None:
        """Nothing to do: there are no parameter groups."""

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.last:
            self.engine.step()

    def reduce_gradients(
        self, nats: Tensor, loss_scale: float = 1.0, scalars: Sequence[float] = ()
    ) -> tuple[float, float, list[float]]:
        """DeepSpeed reduced the gradients in the backward of the last micro-batch; the loss and the norm are left."""
        assert loss_scale == 1, "float16 is refused with DeepSpeed"
        total, *sums = sum_scalars([float(nats) / self.repeats, *scalars], self.device)
        return total, self.partition.gradient_norm() * self.optimizer.scale, sums

    def apply(self, lr: float, grad_norm: float) -> None:
        self.optimizer.prepare(lr, grad_norm)
        self.engine.step()

    def discard(self) -> None:
        self.optimizer.prepare_discard()
        # It clears the gradients, wherever they are offloaded to.
        self.engine.step()

    def state_tensors(self) -> Mapping[str, Tensor | FlatShard]:
        tensors: dict[str, Tensor | FlatShard] = {
            f"model.{name}": parameter.detach()
            for name, parameter in self.parameters.items()
            if not parameter.requires_grad
        }
        partitions = self._all_states()
        for number, states in enumerate(partitions):
            for kind, values in states.items():
                for name, span in self.spans.items():
                    if span is not None and span.flat == number:
                        tensors[_state_name(kind, name)] = self._shard(name, span, values)
        for name, span in self.spans.items():
            if span is None:
                for kind, values in partitions[0].items():
                    tensors[_state_name(kind, name)] = self._shard(name, None, values)
        return tensors

    def after_load(self) -> None:
        for number, copies in self.staged.items():
            with self.partition.fetched(number), torch.no_grad():
                for kind, values in self._states(number).items():
                    values.copy_(copies[kind])
        self.staged = {}
        with torch.no_grad():
            self.partition.publish()

    def begin(self) -> None:
        """Nothing to do: an optimizer that averages the weights, and a moving average of them, are refused."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def counters(self) -> dict[str, int]:
        return self.optimizer.counters()

    def set_counters(self, counters: dict[str, int]) -> None:
        self.optimizer.set_counters(counters)

    def _states(self, number: int) -> dict[str, Tensor]:
        """The parameters ("") and each kind of state of a flat partition that is in memory."""
        flat = self.partition.flats[number]
        optimizer = self.optimizer.optimizer_of(flat, self.decays[self.partition.groups[number]])
        return {"": flat.detach(), **flat_states(optimizer)}

    def _all_states(self) -> list[dict[str, Tensor]]:
        """The states of every flat partition; copies of those on a disk, which `after_load` writes back."""
        partitions = []
        for number, flat in enumerate(self.partition.flats):
            on_disk = flat.numel() == 0
            with self.partition.fetched(number):
                states = self._states(number)
                if on_disk:
                    states = self.staged[number] = {
                        kind: values.clone() for kind, values in states.items()
                    }
            partitions.append(states)
        return partitions

    def _shard(self, name: str, span: ParameterSpan | None, values: Tensor) -> FlatShard:
        shape, offset, box = self.boxes[name]
        if span is None:
            return FlatShard(values[:0], shape, offset, box, 0)
        return FlatShard(values.narrow(0, span.start, span.count), shape, offset, box, span.first)


def _state_name(kind: str, name: str) -> str:
    return f"optimizer.{kind}.{name}" if kind else f"model.{name}"


def _box(parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Global shape, and offset and sizes of this rank's tensor-parallel shard; to call before DeepSpeed empties it."""
    full: Tensor = getattr(parameter, "dtensor", parameter)
    box, offset = local_shape_and_offset(full)
    return tuple(full.shape), offset, box


def has_async_io() -> bool:
    """Whether DeepSpeed's asynchronous I/O for nvme is installed or can be built."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def _initialize(
    model: nn.Module,
    optimizer: FlatOptimizer,
    groups: ProcessGroups,
    ds_config: dict[str, Any],
    cuda: bool,
) -> Any:
    set_deepspeed_accelerator("cuda" if cuda else "cpu")
    import deepspeed
    from deepspeed.utils import logger, set_z3_leaf_modules

    logger.setLevel(logging.WARNING)
    # This op would be compiled for minutes, only to all-reduce between processes of one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if ds_config["zero_optimization"]["stage"] == 3:
        set_z3_leaf_modules(model, [Block])
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in in_blocks:
                # Several modules may use it: all-gathered once for the forward and backward of the model.
                deepspeed.zero.register_external_parameter(model, parameter)
    # DeepSpeed calls deprecated names of torch's collectives, and torch warns at every call.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        mpu=groups,
        config=ds_config,
        dist_init_required=False,
    )
    return engine
