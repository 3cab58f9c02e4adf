"""DeepSpeed's flat partitions: local parameters, their spans, and how a loaded partition reaches the model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xscale.nn.materialize import replace_parameters


def make_plain(model: nn.Module) -> None:
    """Replace every DTensor parameter by its local shard; attribute `dtensor` (on meta) keeps the global layout."""

    def make(_: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        plain = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
        local = plain.detach().to("meta")
        plain.dtensor = DTensor.from_local(  # type: ignore[attr-defined]
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        # It tells DeepSpeed that tp ranks hold different shards, which all count in the gradient norm.
        plain.model_parallel = True  # type: ignore[attr-defined]
        return plain

    with torch.no_grad():
        replace_parameters(model, make)


@dataclass(frozen=True)
class ParameterSpan:
    """This rank's elements of one parameter."""

    flat: int
    """Number of the flat partition."""
    start: int
    """Index of the first of them in the flat partition."""
    first: int
    """Index of the first of them in the parameter."""
    count: int


class PackedPartition:
    """Stages 1 and 2: all parameters concatenated, then split into equal shards."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.flats: list[Tensor] = optimizer.single_partition_of_fp32_groups
        self.groups = list(range(len(self.flats)))
        """Parameter group of each flat partition."""

    def span(self, parameter: nn.Parameter) -> ParameterSpan | None:
        """None where another rank has all of it."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        local, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return ParameterSpan(mapping.param_group_index, in_flat.start, local.start, local.numel)

    @contextmanager
    def fetched(self, number: int) -> Iterator[None]:
        """Bring the partition and its states into memory, where they always are."""
        yield

    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients of all ranks; infinite where one is not finite."""
        norm = float(self.optimizer.scaled_global_norm())
        return norm if norm >= 0 else math.inf

    def publish(self) -> None:
        """Copy the partitions into the parameters of every rank."""
        self.optimizer.update_lp_params()


class SlicedPartition:
    """Stage 3: each parameter split into equal shards, and a rank's shards concatenated."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.flats: list[Tensor] = optimizer.fp32_partitioned_groups_flat
        self.groups = [optimizer.sub_group_to_group_id[number] for number in range(len(self.flats))]

    def span(self, parameter: nn.Parameter) -> ParameterSpan | None:
        sharded: Any = parameter
        flat, start, length = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        first = self.optimizer._get_param_partition_rank(sharded) * length
        count = min(length, sharded.ds_numel - first)
        return ParameterSpan(flat, start, first, count) if count > 0 else None

    @contextmanager
    def fetched(self, number: int) -> Iterator[None]:
        """Bring the partition and its states into memory; they may be on a disk."""
        on_disk = self.optimizer._swappable_optimizer_subgroup(number)
        if on_disk:
            self.optimizer._optimizer_states_and_gradient_swap_in(number)
        yield
        if on_disk:
            self.optimizer._optimizer_states_and_gradient_swap_out(number)

    def gradient_norm(self) -> float:
        norms = [torch.as_tensor(norm) for norm in self.optimizer._get_norm_groups()]
        # A group's norm that is not finite comes as -1.
        return (
            float(torch.linalg.vector_norm(torch.stack(norms)))
            if all(norm >= 0 for norm in norms)
            else math.inf
        )

    def publish(self) -> None:
        for number in range(len(self.flats)):
            with self.fetched(number):
                self.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        persistent = self.optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


Partition = PackedPartition | SlicedPartition
