"""Tensor-parallel regions: forward hooks that copy or all-gather the input and reduce the output (Megatron's f and g).

In a region each rank computes a part of a sublayer. The input is replicated and its gradient is summed over the ranks;
the output is a sum over the ranks and its gradient is replicated. A replicated parameter inside a region enters it as
an input does, so its gradient is all-reduced.

With `regather` each rank saves its own shard of a region's input and all-gathers the full input again when backward
first needs it (Korthikanti et al. 2022, section 4.2.2): one more all-gather for each region, and 1/tp of the memory for
its input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.mesh.collectives import all_gather
from xscale.mesh.differentiable_collectives import copy_in, gather_in, scatter_out, sum_out
from xscale.mesh.torch_private import _is_alias_of
from xscale.nn.module import Module, substitute
from xscale.nn.signals import TOKENS
from xscale.nn.tokens import Tokens
from xscale.parallel.shard.sharding import holds_experts, shard_dim


class GatheredActivation:
    """A rank's shard [B, T/R, D] of an all-gathered activation, saved in place of every tensor that aliases it."""

    def __init__(self, shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
        """`full` is what `gather_in` made of `shard`."""
        self.shard = shard.detach()
        self.length = full.shape[1]
        self.group = group
        self.full: Tensor | None = full
        """The full activation, until the region's forward ends."""
        self.backward: Tensor | None = None
        """The full activation, during the region's backward."""
        if full.requires_grad:
            # Once its gradient is complete, nothing reads the values any more.
            full.register_hook(self._discard)  # type: ignore[no-untyped-call]

    def is_aliased_by(self, saved: Tensor) -> bool:
        """Return whether the tensor shares the storage of the gathered activation."""
        return self.full is not None and bool(_is_alias_of(saved, self.full))

    def gather(self) -> Tensor:
        """Return the full activation; the first call is collective."""
        if self.backward is None:
            self.backward = (
                all_gather(self.shard, 1, self.group).narrow(1, 0, self.length).contiguous()
            )
        return self.backward

    def _discard(self, _: Tensor) -> None:
        self.backward = None


@dataclass(frozen=True)
class SavedView:
    """A view of a gathered activation."""

    activation: GatheredActivation
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.activation.gather().as_strided(self.shape, self.stride, self.offset)


class SaveShards:
    """Saved-tensor hooks of one forward of a region: entered before it and exited after it."""

    def __init__(self, activations: list[GatheredActivation]) -> None:
        self.activations = activations
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def enter(self) -> None:
        self.hooks.__enter__()

    def exit(self) -> None:
        self.hooks.__exit__()
        # The hooks refer to this object: the cycle would keep its activations until Python's collector runs.
        del self.hooks
        for activation in self.activations:
            activation.full = None

    def _pack(self, saved: Tensor) -> Tensor | SavedView:
        for activation in self.activations:
            if activation.is_aliased_by(saved):
                return SavedView(
                    activation, tuple(saved.shape), saved.stride(), int(saved.storage_offset())
                )
        return saved


def _unpack(saved: Tensor | SavedView) -> Tensor:
    return saved.tensor() if isinstance(saved, SavedView) else saved


@dataclass(frozen=True)
class TensorRegion:
    """The tp ranks that compute a region together, as one of them sees them."""

    group: dist.ProcessGroup
    sequence: bool = False
    """Sequence parallelism: activations outside regions are sharded along the sequence (Korthikanti et al. 2022)."""
    experts_replicated: bool = False
    """Whether experts are not sharded over tp."""
    regathers: Callable[[str], bool] = lambda path: False
    """Whether the sublayer at a path all-gathers its input again in backward, rather than save it."""

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def first_of(self, count: int) -> int:
        """Return the index of this rank's first of `count` heads, or hidden units, of all ranks."""
        return self.rank * count // self.count

    def enter(self, x: Tensor, tokens: Tokens) -> Tensor:
        """All-gather (sequence parallelism) or copy an activation into a region: [B, T/R or T, D] -> [B, T, D].

        `tokens` are those of the full sequence.
        """
        return (
            gather_in(x, tokens.ids.shape[1], self.group)
            if self.sequence
            else copy_in(x, self.group)
        )

    def exit(self, y: Tensor) -> Tensor:
        """Reduce-scatter or all-reduce a partial sum out of a region: [B, T, D] -> [B, T/R or T, D]."""
        return scatter_out(y, self.group) if self.sequence else sum_out(y, self.group)

    def shard(self, x: Tensor, fill: int = 0) -> Tensor:
        """Slice this rank's part of the sequence from a replicated [B, T, ...], padded with `fill`. No gradient."""
        missing = -x.shape[1] % self.count
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=fill) if missing else x
        return padded.chunk(self.count, 1)[self.rank]

    def shard_tokens(self, tokens: Tokens) -> Tokens:
        """Slice this rank's part of the sequence from each field of the tokens."""
        return tokens.map_fields(
            lambda value, about: self.shard(value, about.fill) if TOKENS in about.names else value
        )


def wrap_region(part: nn.Module, region: TensorRegion, *, regather: bool = False) -> None:
    """Make a region of a sublayer's part, called as part(x, tokens) or part(x, tokens, memory, source).

    With `regather` the all-gathered input is not saved for backward, but all-gathered again there.
    """
    saving: list[SaveShards] = []

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, tokens, *further_inputs = inputs
        gathered = [(x, region.enter(x, tokens))]
        if further_inputs and further_inputs[0] is not None:
            memory, source = further_inputs
            further_inputs = [region.enter(memory, source), source]
            gathered.append((memory, further_inputs[0]))
        if regather and torch.is_grad_enabled():
            saving.append(
                SaveShards(
                    [GatheredActivation(shard, full, region.group) for shard, full in gathered]
                )
            )
            saving[-1].enter()
        return gathered[0][1], _scale_auxiliary_loss(tokens, region.count), *further_inputs

    def stop_saving(_: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if saving:
            saving.pop().exit()

    def leave(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        return region.exit(y)

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(stop_saving, always_call=True)
    part.register_forward_hook(leave)


def _scale_auxiliary_loss(tokens: Tokens, ranks: int) -> Tokens:
    """Each rank of a region computes the full auxiliary loss, and gradients that leave the region are summed."""
    weight = tokens.forward.aux_loss_weight
    return tokens if weight is None else tokens.with_forward(aux_loss_weight=weight / ranks)


def all_reduce_replicated_grads(part: nn.Module, region: TensorRegion) -> None:
    """Substitute parameter hooks that all-reduce the gradients of replicated parameters inside a region."""
    for module in part.modules():
        # Experts that tp does not shard are sharded over its ranks by ep or ZeRO, which also sum their gradients.
        if (
            isinstance(module, Module)
            and module.axes
            and not (region.experts_replicated and holds_experts(module))
        ):
            substitute(module, "param_hook", region_param_hook(module, region))


def region_param_hook(module: Module, region: TensorRegion) -> Callable[[Tensor], Tensor]:
    """Return the parameter hook of a module in a region: sharded parameters pass as they are, replicated ones enter.

    The bias of a row-parallel product, whose output is summed over the ranks, is added on the first rank only.
    """
    inner = module.param_hook
    parameters = module.named_parameters(recurse=False)
    row_parallel = {
        module.axes[name][:-1]
        for name, parameter in parameters
        if shard_dim(parameter, "tp") == parameter.dim() - 1
    }
    biases = [name for name, axes in module.axes.items() if axes in row_parallel]

    def hook(parameter: Tensor) -> Tensor:
        local = parameter if inner is None else inner(parameter)
        if shard_dim(parameter, "tp") is not None:
            return local
        entered = copy_in(local, region.group)
        if region.rank and any(getattr(module, name) is parameter for name in biases):
            # A factor, not another graph: every rank must join the all-reduce of the gradient.
            return entered * 0.0
        return entered

    return hook
