"""The bridge to torch distributed checkpoint: cuts are planned and written by it, through a Disk; and read back."""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from xscale.checkpoint.agree import Ranks
from xscale.checkpoint.cut import Cut
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.layout import TENSORS

OVERHEAD = 2048
"""Bytes that torch.save and the metadata add to a piece, generously."""


@dataclass(frozen=True)
class Held:
    """A tensor as a checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Planner(DefaultSavePlanner):
    """Plans what each rank writes from cuts, and refuses before the first byte when the disk is too small."""

    def __init__(self, cuts: Mapping[str, Cut], require: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._cuts = cuts
        self._require = require

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, cut in self._cuts.items():
            shape, offset = torch.Size(cut.shape), torch.Size(cut.offset)
            properties = TensorProperties(dtype=cut.piece.dtype)
            data = TensorWriteData(ChunkStorageMetadata(offset, cut.piece.shape), properties, shape)
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        pieces = sum(len(plan.items) for plan in plans)
        held = contents(metadata).values()
        size = sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in held)
        self._require(size + OVERHEAD * pieces)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._cuts[index.fqn].piece


class _Files(FileSystem):
    """Opens files for DCP through a Disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with self._disk.writing(Path(path)) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        self._disk.rename(Path(path), Path(new_path))
        self._disk.written[Path(new_path)] = self._disk.written.pop(Path(path))


class _Writer(FileSystemWriter):
    """One file a rank; one thread, because an error in any other of DCP's would be lost."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)
        self.fs = _Files(disk)

    def storage_meta(self) -> StorageMeta | None:
        # Path and time of writing would make equal checkpoints differ.
        return StorageMeta()


def write(path: Path, cuts: Mapping[str, Cut], disk: Disk, ranks: Ranks, final: Path) -> None:
    """Write the cuts of all ranks below `path`, each box once. Collective; CheckpointError of `final` on every rank."""
    planner = _Planner(cuts, lambda size: disk.require(path, size))
    writer = _Writer(path / TENSORS, disk)
    index: list[Metadata] = []

    def local() -> SavePlan:
        planner.set_up_planner({}, writer.storage_meta(), ranks.first)
        writer.set_up_storage_writer(ranks.first, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        index.append(metadata)
        return writer.prepare_global_plan(plans)

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(index[0], results)
        return [None] * ranks.world

    plan = ranks.share(final, local, divide)
    ranks.share(final, lambda: writer.write_data(planner.finish_plan(plan), planner).wait(), finish)


def read(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill `tensors` in place, whatever the layout that wrote them. Collective; CheckpointError on every rank."""

    def fill() -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(path / TENSORS)
        metadata = metadata_of(path)
        planner.set_up_planner(cast(dict[str, Any], tensors), metadata, ranks.first)
        reader.set_up_storage_reader(metadata, ranks.first)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    ranks.every(path, fill)


class _Plain(pickle.Unpickler):
    """Reads DCP's metadata, which is a pickle, and nothing else: a checkpoint from a stranger must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        plain = {"builtins": ("set", "list", "dict", "getattr"), "collections": ("OrderedDict",)}
        plain |= {"torch": ("Size", "device"), "torch.serialization": ("_get_layout",)}
        known = module.startswith("torch.distributed.checkpoint.") and "." not in name
        if (
            known
            or name in plain.get(module, ())
            or (module == "torch" and isinstance(getattr(torch, name), torch.dtype))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def metadata_of(path: Path) -> Metadata:
    """DCP's own index of the checkpoint at `path`; DamageError when it cannot be read."""
    file = path / TENSORS / ".metadata"
    try:
        metadata = _Plain(io.BytesIO(file.read_bytes())).load()
    except FileNotFoundError:
        raise DamageError(
            path, f"the file {TENSORS}/.metadata is missing", "Take another checkpoint.", "missing"
        ) from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError, KeyError, TypeError) as error:
        what = f"{TENSORS}/.metadata is not an index of tensors: {error}"
        raise DamageError(path, what, "Take another checkpoint.", "unreadable") from None
    assert isinstance(metadata, Metadata)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def contents(metadata: Metadata) -> dict[str, Held]:
    """Name, shape and dtype of every tensor in a checkpoint."""
    return {
        name: Held(tuple(one.size), one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
