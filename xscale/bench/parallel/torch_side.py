"""The torch side: the same decoder in plain torch modules, parallelised with torch's own API."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from xscale.bench.parallel.sizes import RANKS, ParallelSizes, batch_slice
from xscale.bench.parallel.torch_model import (
    SelfAttention,
    TorchModel,
    TorchMoe,
    build_torch_model,
    causal,
)
from xscale.mesh.mesh import Mesh
from xscale.mesh.torch_private import functional_collectives as collectives


class TorchSide:
    """Forward and backward of a step by `run`, which returns this rank's part of the summed loss."""

    def __init__(self, model: nn.Module, run: Callable[[], Tensor]) -> None:
        self.model = model
        self.step = run

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by xscale's parameter names."""
        gradients: dict[str, Any] = {
            name.replace("position.weight.weight", "position.weight"): parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        return gradients

    def clear(self) -> None:
        """Discard the gradients."""
        self.model.zero_grad(set_to_none=True)


def tensor(sizes: ParallelSizes, mesh: Mesh) -> TorchSide:
    """Tensor parallelism by parallelize_module with column- and row-wise styles, and loss_parallel."""
    model = build_torch_model(sizes, experts=False)
    assert mesh.dense is not None
    styles: dict[str, ParallelStyle] = {
        "embed.table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in range(sizes.depth):
        block = f"stack.blocks.{layer}"
        for name in (
            "mixer.part.q",
            "mixer.part.k",
            "mixer.part.v",
            "ffn.part.gate",
            "ffn.part.up",
        ):
            styles[f"{block}.{name}"] = ColwiseParallel()
        for name in ("mixer.part.o", "ffn.part.down"):
            styles[f"{block}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh.dense["tp"], styles)
    batch = sizes.batch()
    return TorchSide(
        model, _step(model, batch.tokens.ids, batch.targets, sizes, inside=loss_parallel)
    )


def pipeline(sizes: ParallelSizes, mesh: Mesh) -> TorchSide:
    """Pipeline parallelism by PipelineStage and Schedule1F1B."""
    model = build_torch_model(sizes, experts=False)
    assert mesh.dense is not None
    group = mesh.dense["pp"].get_group()
    rank, half = group.rank(), sizes.depth // RANKS
    model.stack.blocks = nn.ModuleDict(
        {name: block for name, block in model.stack.blocks.items() if int(name) // half == rank}
    )
    if rank:
        model.embed = None
    else:
        model.head, model.stack.norm = None, nn.Identity()
    stage = PipelineStage(model, rank, RANKS, mesh.device, group=group)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return _summed(logits, targets) / sizes.targets

    schedule = Schedule1F1B(stage, sizes.sequences // 2, loss, scale_grads=False)
    batch = sizes.batch()

    def run() -> Tensor:
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=batch.targets, losses=losses)
        else:
            schedule.step(batch.tokens.ids)
        return (
            torch.stack(losses).sum().double() * sizes.targets
            if losses
            else torch.zeros((), dtype=torch.float64)
        )

    return TorchSide(model, run)


def ring(sizes: ParallelSizes, mesh: Mesh) -> TorchSide:
    """Context parallelism: all-gather of keys and values, attention of the local queries to them."""
    group = mesh.context
    assert group is not None
    shard = sizes.length // RANKS
    positions = torch.arange(sizes.length)
    mask = positions[None, :] <= positions[group.rank() * shard : (group.rank() + 1) * shard, None]

    # Renamed in torch 2.13.
    functions: Any = vars(collectives)
    gather = functions.get("all_gather_single_autograd") or functions["all_gather_tensor_autograd"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gathered = gather(torch.stack((k, v)).movedim(3, 0).contiguous(), 0, group)
        both = _with_contiguous_gradient(gathered).movedim(0, 3)
        return F.scaled_dot_product_attention(q, both[0], both[1], attn_mask=mask)

    return _context_parallel_side(sizes, mesh, attend)


def ulysses(sizes: ParallelSizes, mesh: Mesh) -> TorchSide:
    """Context parallelism: two all-to-alls, from sequence shards to heads and back."""
    group = mesh.context
    assert group is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.stack((q, k, v))  # [3, B, H, T/R, K]
        full_sequence = _all_to_all(
            torch.unflatten(rows, 2, (RANKS, -1)).movedim(2, 0), group
        )  # [R, 3, B, H/R, T/R, K]
        out = causal(*full_sequence.movedim(0, 3).flatten(3, 4))
        back = _all_to_all(
            torch.unflatten(out, 2, (RANKS, -1)).movedim(2, 0), group
        )  # [R, B, H/R, T/R, K]
        return back.movedim(0, 1).flatten(1, 2)

    return _context_parallel_side(sizes, mesh, attend)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: slice r of [R, ...] goes to rank r."""
    received: Tensor = collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)
    return _with_contiguous_gradient(received)


def _with_contiguous_gradient(received: Tensor) -> Tensor:
    """Return the output of a collective, whose backward in torch 2.11 sends contiguous gradients alone."""
    if received.requires_grad:
        received.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]
    return received


def _context_parallel_side(
    sizes: ParallelSizes, mesh: Mesh, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> TorchSide:
    model = build_torch_model(sizes, experts=False)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = attend
    assert mesh.context is not None
    rank = mesh.context.rank()
    _fully_shard(model, mesh, set())
    batch, first = sizes.batch(), rank * (sizes.length // RANKS)
    ids, targets = (
        tensor.chunk(RANKS, 1)[rank].contiguous() for tensor in (batch.tokens.ids, batch.targets)
    )
    return TorchSide(model, _step(model, ids, targets, sizes, first=first))


def experts(sizes: ParallelSizes, mesh: Mesh) -> TorchSide:
    """Expert parallelism by all_to_all_single; all other parameters sharded by fully_shard."""
    model = build_torch_model(sizes, experts=True)
    assert mesh.experts is not None
    group = mesh.experts["ep"].get_group()
    per_rank = sizes.experts // RANKS
    expert_parameters: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, TorchMoe):
            for name, weight in list(module.experts.named_parameters()):
                local = weight.detach()[
                    group.rank() * per_rank : (group.rank() + 1) * per_rank
                ].clone()
                setattr(module.experts, name, nn.Parameter(local))
            expert_parameters |= set(module.experts.parameters())
            module.run = _dispatch(module, group)
    _fully_shard(model, mesh, expert_parameters)
    batch = batch_slice(sizes.batch(), mesh.data_rank, RANKS)
    return TorchSide(model, _step(model, batch.tokens.ids, batch.targets, sizes))


def _dispatch(mixture: TorchMoe, group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], Tensor]:
    def run(rows: Tensor, counts: Tensor) -> Tensor:
        sent = counts.view(RANKS, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        outgoing, incoming = torch.stack((sent.sum(1), received.sum(1))).tolist()
        arrived = collectives.all_to_all_single_autograd(rows, incoming, outgoing, group)
        # Rows arrive sorted by (rank, expert); the experts need (expert, rank).
        labels = torch.arange(received.shape[1]).repeat(RANKS).repeat_interleave(received.flatten())
        order = labels.argsort(stable=True)
        outputs = mixture.experts(arrived[order], received.sum(0).tolist())
        returned: Tensor = collectives.all_to_all_single_autograd(
            outputs[order.argsort()], outgoing, incoming, group
        )
        return returned

    return run


def _fully_shard(model: TorchModel, mesh: Mesh, ignored: set[nn.Parameter]) -> None:
    """FSDP over the data-parallel ranks, with summed gradients."""
    assert mesh.dense is not None
    options: Any = {
        "mesh": mesh.dense["dp_shard"],
        "reshard_after_forward": False,
        "ignored_params": ignored,
    }
    for block in model.stack.blocks.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _step(
    model: nn.Module,
    ids: Tensor,
    targets: Tensor,
    sizes: ParallelSizes,
    *,
    first: int = 0,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with inside():
            loss = _summed(model(ids, first), targets)
            (loss / sizes.targets).backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()

    return run


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
