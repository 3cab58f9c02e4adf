"""ZeRO (Rajbhandari et al. 2020) by torch's fully_shard (FSDP2): sharding over the data-parallel ranks.

Stage 0 uses a shard group of one rank, so parameters are replicated and gradients all-reduced (DDP). Stage 1
accumulates full gradients over the micro-batches of a step and reduce-scatters them once. Stage 2 reduce-scatters the
gradients of each micro-batch; parameters stay gathered until the end of the step. Stage 3 also reshards parameters
after each use.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.mesh.axes import Degrees
from xscale.mesh.mesh import Mesh
from xscale.nn.blocks.block import Block
from xscale.nn.module import Module
from xscale.parallel.config import ParallelConfig
from xscale.parallel.shard.sharding import (
    data_parallel_mesh,
    dense_mesh,
    expert_mesh,
    holds_experts,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


def check(config: ParallelConfig, degrees: Degrees, path: str) -> list[Problem]:
    """Return settings that contradict each other."""
    zero, where = config.zero, f"{path}.zero.prefetch"
    if zero.prefetch and (zero.engine, zero.stage) != ("torch", 3):
        reason = f"at stage {zero.stage} parameters are already resident"
        if zero.engine != "torch":
            reason = "DeepSpeed prefetches by itself"
        stage = change((f"{path}.zero.engine", "torch"), (f"{path}.zero.stage", 3))
        if zero.engine == "torch":
            stage = take(3, key=f"{path}.zero.stage")
        return [Problem(where, f"prefetch needs ZeRO-3; {reason}", choices=take(0) + stage)]
    return []


def apply(
    model: nn.Module, mesh: Mesh, config: ParallelConfig, compute: torch.dtype, master: torch.dtype
) -> None:
    """Shard every block, the experts over their own ranks, and the remaining parameters as one group."""
    if mesh.dense is None or mesh.experts is None:
        return
    # Imported where used, here and below: it takes as long as half of torch, and a check of a config shards nothing.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    dense = data_parallel_mesh(dense_mesh(mesh, config), "dp_replicate", "dp_shard")
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False
    )
    reshard = config.zero.stage == 3
    unsharded_experts: set[nn.Parameter] = set()
    for module in _experts(model) if mesh.degrees.has_expert_layout else []:
        parameters = module.named_parameters(recurse=False)
        expert_parameters = {
            parameter for name, parameter in parameters if "experts" in module.axes[name]
        }
        if mesh.degrees.expert_shard * mesh.degrees.dp_replicate > 1:
            expert_data = data_parallel_mesh(
                expert_mesh(mesh, config), "dp_replicate", "expert_shard"
            )
            fully_shard(
                module,
                mesh=expert_data,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=choose_shard_dim(expert_data.size(expert_data.ndim - 1)),
            )
        else:
            unsharded_experts |= expert_parameters
    options: Any = {
        "mesh": dense,
        "mp_policy": policy,
        "ignored_params": unsharded_experts,
        "shard_placement_fn": choose_shard_dim(dense.size(dense.ndim - 1)),
    }
    exact: Any = {
        **options,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=master, cast_forward_inputs=False),
    }
    for part in [
        module
        for module in model.modules()
        if isinstance(module, Module) and module.keeps_precision
    ]:
        if compute != master and list(part.parameters()):
            fully_shard(part, reshard_after_forward=reshard, **exact)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for fsdp_module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        # Losses are divided by the step's total of targets before backward, so gradients are summed, not averaged.
        fsdp_module.set_gradient_divide_factor(1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)
    set_prefetch(model, prefetched_blocks(config, mesh.degrees))


def prefetched_blocks(config: ParallelConfig, degrees: Degrees) -> int:
    """Return how many blocks ahead ZeRO-3 all-gathers in forward."""
    if config.zero.prefetch is not None:
        return config.zero.prefetch
    return 1 if config.zero.stage == 3 and degrees.ep > 1 else 0


def set_prefetch(model: nn.Module, ahead: int) -> None:
    """Have each block all-gather the parameters of that many later ones in forward."""
    from torch.distributed.fsdp import FSDPModule

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number, block in enumerate(blocks) if ahead else ():
        assert isinstance(block, FSDPModule)
        following = [
            module
            for later in blocks[number + 1 : number + 1 + ahead]
            for module in later.modules()
        ]
        block.set_modules_to_forward_prefetch(
            [module for module in following if isinstance(module, FSDPModule)]
        )


def choose_shard_dim(shards: int) -> "Callable[[nn.Parameter], Shard | None]":
    """Return the `shard_placement_fn`: prefer a dim that tp and ep do not shard and that `shards` divides.

    Then a rank's shard is contiguous rows, and the shards of a layout are adjacent boxes of the full tensor.
    """
    from torch.distributed.tensor import DTensor, Shard

    def choose(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor):
            return None
        shape = parameter.to_local().shape
        sharded_dims = {
            placement.dim for placement in parameter.placements if isinstance(placement, Shard)
        }
        preferred = sorted(range(len(shape)), key=lambda dim: dim in sharded_dims)
        # fully_shard shards only the first dim unevenly.
        usable = [
            dim
            for dim in preferred
            if shape[dim] % shards == 0 or (dim == 0 and dim not in sharded_dims)
        ]
        return Shard(usable[0] if usable else 0)

    return choose


def set_gradient_sync(model: nn.Module, config: ParallelConfig, *, last: bool) -> None:
    """Set up FSDP before a micro-batch; `last` says whether it is the step's last (gradient accumulation).

    Stages 0 and 1 reduce gradients once a step, and only stage 3 gathers parameters more than once a step.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or config.zero.stage >= 2)
        model.set_reshard_after_backward(last or config.zero.stage == 3)


def _experts(model: nn.Module) -> list[Module]:
    return [
        module for module in model.modules() if isinstance(module, Module) and holds_experts(module)
    ]
