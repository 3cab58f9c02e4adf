"""Private names of torch that xscale uses, each resolved on first use, so that importing this file loads none of them.

A new version of torch may move or drop any of them; `tests/mesh/test_torch_private.py` imports each. Nothing else in
xscale names a private module or function of torch. `xscale_kernels/torch_private.py` has those of the kernels.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
    )
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException as DynamicOutputShapeException,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed.checkpoint.filesystem import _StorageInfo as _StorageInfo
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as _disable_current_modes
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

SEEN_IN = ("2.13.0",)
"""Versions of torch in which every name below was found."""

NAMES = {
    "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DispatchKey": "torch._C:DispatchKey",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "OPDEFS": "torch._library.custom_ops:OPDEFS",
    "PrefixStore": "torch._C._distributed_c10d:PrefixStore",
    "PyTorchFileWriter": "torch._C:PyTorchFileWriter",
    "Store": "torch._C._distributed_c10d:Store",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "dynamo_config": "torch._dynamo:config",
    "dynamo_counters": "torch._dynamo.utils:counters",
    "_SetExcludeDispatchKeyGuard": "torch._C:_SetExcludeDispatchKeyGuard",
    "_StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "_StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    "_abort_process_group": "torch.distributed.distributed_c10d:_abort_process_group",
    "_clear_sharding_prop_cache": "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "_disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "_get_current_dispatch_mode_stack": "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "_get_default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "_is_alias_of": "torch._C:_is_alias_of",
    "_resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "_save": "torch.serialization:_save",
    "c10d_bindings": "torch._C:_distributed_c10d",
    "c10d_functional": "torch:ops._c10d_functional",
    "cpu_flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "cpu_flash_attention_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "dump_memory_snapshot": "torch.cuda.memory:_dump_snapshot",
    "flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention",
    "flash_attention_backward": "torch:ops.aten._scaled_dot_product_flash_attention_backward",
    "inductor_cache_dir": "torch._inductor.runtime.cache_dir_utils:cache_dir",
    "functional_collectives": "torch.distributed:_functional_collectives",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "scaled_mm": "torch:_scaled_mm",
    "stage_backward_input": "torch.distributed.pipelining._backward:stage_backward_input",
    "stage_backward_weight": "torch.distributed.pipelining._backward:stage_backward_weight",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
}
"""Name here -> "module:attribute"."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = NAMES[name].partition(":")
    value: Any = import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return value


def _parameter_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state; torch 2.11 has one or none, under another name."""
    attributes = vars(state)
    if "_fsdp_param_groups" in attributes:
        return list(attributes["_fsdp_param_groups"])
    group = attributes["_fsdp_param_group"]
    return [] if group is None else [group]


def reset_sharded_parameters(model: nn.Module) -> None:
    """Tell every FSDP module that the storage of its parameters was replaced.

    fully_shard keeps its own record of each parameter. It would renew the record when the module is moved, but moving
    swaps tensors in place, which fake tensors refuse.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module._get_fsdp_state()):
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()


def post_backward(model: nn.Module) -> None:
    """Run FSDP's post-backward of a model: reduce-scatter the gradients that are stored on its parameters."""
    from torch.distributed.fsdp import fully_shard

    root = fully_shard.state(model)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            # Called for every group: a backward to the weights may have skipped the hook that marks a group as done.
            group.post_backward()
    root._root_post_backward_final_callback()


def node_outlives_graph() -> bool:
    """Whether the node of an autograd.Function can be differentiated from when nothing else of its graph is left.

    stage_backward_weight needs that, after stage_backward_input has released the graph. Before torch 2.13 it raises
    RuntimeError; that of 2.11 would also sum the gradients of a node's outputs into those of the first.
    """
    return torch.__version__ >= "2.13"  # TorchVersion compares numbers


def rank_operations(
    schedule: Any, pp: int, stages_per_rank: int, micro_batches: int
) -> list[list[Any]]:
    """Return the actions of each rank in a schedule class of torch.distributed.pipelining, without making stages."""
    from types import SimpleNamespace

    arguments = SimpleNamespace(
        pp_group_size=pp,
        num_stages=stages_per_rank * pp,
        n_local_stages=stages_per_rank,
        _n_microbatches=micro_batches,
    )
    return [list(schedule._calculate_single_rank_operations(arguments, rank)) for rank in range(pp)]


CompiledCallWrapper = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""(a module's call as torch.compile compiled it, its call without) -> its call."""


def wrap_compiled_call(module: nn.Module, wrap: CompiledCallWrapper) -> None:
    """Replace the call of a module on which `compile` was called."""
    compiled: Any = module._compiled_call_impl
    module._compiled_call_impl = wrap(compiled, module._call_impl)


def is_compiler_imported() -> bool:
    """Whether anything has imported torch.compile's compiler."""
    return "torch._dynamo" in sys.modules
