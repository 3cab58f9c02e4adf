"""Tensors in files, in the format of torch distributed checkpoint (DCP), which torch's own tools can read too."""

import contextlib
import copy
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from typing_extensions import Buffer

from xscale.checkpoint.disk import Disk, HashingFile
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.files import INDEX, TENSORS
from xscale.checkpoint.index import FIX, UNREADABLE, read_index
from xscale.checkpoint.planner import CheckpointPlan, LoadPlanner
from xscale.checkpoint.torch_file import load_torch_file
from xscale.core.files.run_files import open_run_file
from xscale.core.foreign import reason
from xscale.mesh.consensus import Consensus
from xscale.mesh.flat_shard import FlatShard
from xscale.mesh.torch_private import PyTorchFileWriter, _save, _StorageInfo

VERSION = "1.0.0"
"""Version of DCP's format."""
ALIGNMENT = 64
StorageInfo = dict[MetadataIndex, _StorageInfo]
"""File, offset and length of each box."""


def write(
    path: Path,
    plan: CheckpointPlan,
    box: Callable[[WriteItem], Tensor],
    disk: Disk,
    ranks: Consensus,
    final: Path,
) -> None:
    """Write this rank's boxes, and on rank 0 the index of all. Collective; errors name `final`."""

    def write_mine() -> StorageInfo:
        return _write_boxes(path / TENSORS, f"__{ranks.rank}_0.distcp", plan.items, box, disk)

    def write_index(parts: list[StorageInfo]) -> list[None]:
        index = copy.copy(plan.index)
        assert index is not None
        index.storage_data = {box: info for part in parts for box, info in part.items()}
        # A path and a time here would make equal checkpoints differ.
        index.storage_meta = StorageMeta()
        index.version = VERSION
        disk.write(path / TENSORS / INDEX, pickle.dumps(index, protocol=4))
        return [None] * ranks.world

    ranks.gather_then_scatter(final, write_mine, write_index)


def _write_boxes(
    folder: Path,
    name: str,
    items: tuple[WriteItem, ...],
    box: Callable[[WriteItem], Tensor],
    disk: Disk,
) -> StorageInfo:
    written: StorageInfo = {}
    if not items:
        return written
    with disk.writing(folder / name) as stream:
        for item in items:
            start = stream.tell()
            _write_box(stream, box(item))
            written[item.index] = _StorageInfo(name, start, stream.tell() - start)
    return written


def _write_box(stream: HashingFile, tensor: Tensor) -> None:
    """Write what `torch.save` writes, without its CRC-32, which is slow, holds the GIL and is never read."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    archive = PyTorchFileWriter(cast(IO[bytes], stream), False, ALIGNMENT)
    try:
        _save(tensor, archive, pickle, 2, False)
    except BaseException:
        # Otherwise the archive ends itself when it is garbage-collected, and a second failure there aborts the process.
        with contextlib.suppress(Exception):
            archive.write_end_of_file()
        raise
    archive.write_end_of_file()


def read(
    path: Path,
    tensors: Mapping[str, Tensor | FlatShard],
    ranks: Consensus,
    index: Metadata | None = None,
) -> None:
    """Fill `tensors` in place, whatever the layout that wrote them. Collective; CheckpointError on every rank.

    `index`: the index of the checkpoint, if the caller has read it already.
    """
    assert not any(tensor.is_meta for tensor in tensors.values()), (
        "tensors are on the meta device: materialize them first"
    )

    def fill() -> None:
        metadata = index or read_index(path)
        planner = LoadPlanner(tensors, metadata, ranks.is_rank0)
        plan = planner.finish_plan(planner.create_local_plan())
        try:
            _read_boxes(path / TENSORS, metadata, planner, plan)
        except torch.OutOfMemoryError:
            raise
        except UNREADABLE as error:
            # The index is checked and the target tensors fit it: the bytes of a box are not those of its tensor.
            what = f"a box in {TENSORS} is not the tensor that {INDEX} describes ({reason(error)})"
            raise DamageError(path, what, FIX, "unreadable") from None

    ranks.on_all(path, fill)


class OutsideError(OSError):
    """A position outside of a box, which an archive that is torn or forged names: no fault of the disk.

    An OSError, as a file raises it, which readers of archives expect.
    """


class _FileSlice(io.RawIOBase):
    """`length` bytes of an open file from `start` on, as a file."""

    def __init__(self, file: "io.BufferedReader[Any]", start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        if self._at < 0:
            raise OutsideError("a position before the start")
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        if not view:
            # An offset that no file can have is an error of the system, as of a disk.
            return 0
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


def _read_boxes(folder: Path, metadata: Metadata, planner: LoadPlanner, plan: LoadPlan) -> None:
    """Copy each box of a plan into its tensor. RuntimeError for a box that is not what the index says."""
    items: dict[str, list[ReadItem]] = {}
    for item in plan.items:
        items.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    shapes = _box_shapes(metadata, {item.storage_index.fqn for item in plan.items})
    for name, of_file in items.items():
        with io.BufferedReader(open_run_file(folder / name)) as file:
            latest: tuple[MetadataIndex, Tensor] | None = None
            # Several shards of this rank may have a part of one box, which is read once.
            for item in sorted(
                of_file, key=lambda item: metadata.storage_data[item.storage_index].offset
            ):
                box_index = item.storage_index
                if latest is None or latest[0] != box_index:
                    dtype = cast(
                        TensorStorageMetadata, metadata.state_dict_metadata[box_index.fqn]
                    ).properties.dtype
                    latest = (
                        box_index,
                        _read_box(file, metadata.storage_data[box_index], shapes[box_index], dtype),
                    )
                box = latest[1]
                for dim, (offset, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    box = box.narrow(dim, offset, length)
                planner.resolve_tensor(item).detach().copy_(box)


def _box_shapes(metadata: Metadata, names: set[str]) -> dict[MetadataIndex, torch.Size]:
    """Shape of every box of these tensors."""
    entries = {
        name: cast(TensorStorageMetadata, metadata.state_dict_metadata[name]) for name in names
    }
    return {
        MetadataIndex(name, chunk.offsets): chunk.sizes
        for name, entry in entries.items()
        for chunk in entry.chunks
    }


def _read_box(
    file: "io.BufferedReader[Any]", info: _StorageInfo, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Read a box from what `torch.save` wrote of it, and nothing else."""
    stream = _FileSlice(file, info.offset, info.length)
    try:
        box = load_torch_file(cast(IO[bytes], stream))
    except (OutsideError, zipfile.BadZipFile, struct.error) as error:
        raise RuntimeError(f"not an archive of torch.save: {error}") from None
    if not isinstance(box, Tensor):
        raise RuntimeError("it is no tensor")
    if box.dtype != dtype:
        raise RuntimeError(f"it is {box.dtype}, and the index says {dtype}")
    if box.shape != shape:
        raise RuntimeError(f"its shape is {list(box.shape)}, and the index says {list(shape)}")
    return box
