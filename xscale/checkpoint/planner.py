"""Boxes of tensors: which of them a rank stores, which it writes in a save, and which it reads in a load."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from xscale.checkpoint.index import tensor_entries
from xscale.mesh.consensus import Consensus
from xscale.mesh.flat_shard import FlatShard
from xscale.mesh.torch_private import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Box:
    """A box of a sharded tensor; several ranks may have the same box, which is then written once."""

    local: Tensor
    """The numbers of the box, on any device."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Offset of the box in the full tensor, along each dim."""


def local_shards(tensors: Mapping[str, Tensor | Box | FlatShard]) -> dict[str, Box | FlatShard]:
    """Return this rank's shard of each tensor.

    A plain tensor is replicated: its box is the full tensor. A DTensor of a mesh without this rank has no entry.
    """
    shards: dict[str, Box | FlatShard] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            shards[name] = tensor
        elif not isinstance(tensor, DTensor):
            shards[name] = Box(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
        elif tensor.device_mesh.get_coordinate() is not None:
            shards[name] = _box_of_dtensor(name, tensor)
    return shards


def _box_of_dtensor(name: str, tensor: DTensor) -> Box:
    assert not any(placement.is_partial() for placement in tensor.placements), (
        f"{name} is a partial sum: reduce it"
    )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    with torch.no_grad():
        local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape), (
        f"{name}: local {tuple(local.shape)}, but its placements say {shape}"
    )
    return Box(local.detach(), tuple(tensor.shape), tuple(offset))


def copy_box(target: Tensor, source: Tensor) -> None:
    """Copy into a CPU tensor; from another CPU tensor with one thread, since waking more costs more than they gain."""
    if source.is_cuda or not source.is_contiguous() or not source.numel():
        target.copy_(source)
        return
    numpy.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: Tensor) -> "numpy.typing.NDArray[numpy.uint8]":
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


MAX_BOX_BYTES = 16 << 20
"""Larger shards are written as several boxes. Smaller boxes balance a replicated tensor better over its ranks, and let
a rank that wants a part of a tensor read little more than that part."""
BOX_OVERHEAD_BYTES = 2048
"""Upper bound of what the format and the index add to a box."""

Outline = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]]
"""For each tensor: full shape, offset, (first element, *local shape), dtype."""


@dataclass(frozen=True)
class CheckpointPlan:
    """One rank's part of a save; the plan is valid for every save with the same outline."""

    items: tuple[WriteItem, ...]
    """The boxes that this rank writes."""
    index: Metadata | None
    """The index of all ranks' boxes, on rank 0."""
    size: int
    """Upper bound of the bytes that all ranks write."""
    outline: Outline


def outline(shards: Mapping[str, Box | FlatShard]) -> Outline:
    """Describe the layout of this rank's shards: everything but the numbers."""
    return {
        name: (
            shard.shape,
            shard.offset,
            (shard.first if isinstance(shard, FlatShard) else 0, *shard.local.shape),
            shard.local.dtype,
        )
        for name, shard in shards.items()
    }


def plan_save(
    shards: Mapping[str, Box | FlatShard], path: Path, ranks: Consensus
) -> CheckpointPlan:
    """Divide the boxes of all ranks among them, without duplicates and balanced by bytes. Collective."""
    items = [item for name, shard in shards.items() for item in write_items(name, shard)]
    with paused_garbage_collection():
        local_plan = ranks.gather_then_scatter(path, lambda: SavePlan(items), divide_plans)
    return replace(local_plan, outline=outline(shards))


def divide_plans(local_plans: list[SavePlan]) -> list[CheckpointPlan]:
    """Turn what each rank could write into what each rank writes; the first plan has the index. Outlines are empty."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save_plans, index = planner.create_global_plan(local_plans)
    size = sum(
        entry.size + BOX_OVERHEAD_BYTES * entry.boxes for entry in tensor_entries(index).values()
    )
    plans = [CheckpointPlan(tuple(plan.items), None, size, {}) for plan in save_plans]
    plans[0] = replace(plans[0], index=index)
    return plans


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Let nothing look for cycles in the block: a plan makes many small objects and no cycles.

    Each of Python's full collections looks at all objects of the process, and so many new ones cause several.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def write_items(name: str, shard: Box | FlatShard) -> list[WriteItem]:
    """Split the shard into boxes along its first dim; a flat shard is first split into boxes."""
    if isinstance(shard, FlatShard):
        return [
            item
            for view, offset in shard.boxes()
            for item in write_items(name, Box(view, shard.shape, offset))
        ]
    sizes, offset = tuple(shard.local.shape), shard.offset
    rows = sizes[0] if sizes else 1
    row_size = shard.local.nbytes // max(rows, 1)
    step = max(1, MAX_BOX_BYTES // max(row_size, 1))
    items = []
    for start in range(0, max(rows, 1), step):
        # A box of no rows still records that the tensor exists.
        at = (offset[0] + start, *offset[1:]) if sizes else ()
        extent = (min(step, rows - start), *sizes[1:]) if sizes else ()
        chunk = ChunkStorageMetadata(torch.Size(at), torch.Size(extent))
        data = TensorWriteData(
            chunk, TensorProperties(dtype=shard.local.dtype), torch.Size(shard.shape)
        )
        items.append(
            WriteItem(MetadataIndex(name, torch.Size(at)), WriteItemType.SHARD, tensor_data=data)
        )
    return items


def view_of_item(shard: Box | FlatShard, item: WriteItem) -> Tensor:
    """Return the box of the shard that `item` writes, as a view."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if isinstance(shard, FlatShard):
        return shard.view(chunk.offsets, chunk.sizes)
    if not shard.offset:
        return shard.local
    return shard.local.narrow(0, chunk.offsets[0] - shard.offset[0], chunk.sizes[0])


class LoadPlanner(DefaultLoadPlanner):
    """Reads tensors as torch's load planner does, and each flat shard box by box, which torch's planner cannot."""

    def __init__(
        self, tensors: Mapping[str, Tensor | FlatShard], index: Metadata, is_rank0: bool
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.views: dict[MetadataIndex, Tensor] = {}
        self.flat_shards = {
            name: tensor for name, tensor in tensors.items() if isinstance(tensor, FlatShard)
        }
        plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        self.set_up_planner(plain, index, is_rank0)

    def create_local_plan(self) -> LoadPlan:
        items = super().create_local_plan().items
        assert self.metadata is not None
        for name, shard in self.flat_shards.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            boxes = shard.boxes()
            self.views |= {MetadataIndex(name, torch.Size(offset)): view for view, offset in boxes}
            chunks = [
                ChunkStorageMetadata(torch.Size(offset), view.size()) for view, offset in boxes
            ]
            items = items + create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self.flat_shards:
            return self.views[index]
        return super().lookup_tensor(index)
