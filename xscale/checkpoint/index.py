"""The index of a checkpoint's tensors: torch distributed checkpoint's `.metadata`, read without trusting it."""

import io
import itertools
import math
import pickle
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.files import INDEX, TENSORS
from xscale.core.files.file_safety import check_relative
from xscale.core.files.run_files import read_run_file
from xscale.mesh.torch_private import _StorageInfo

FIX = "Use another checkpoint, or copy this one again from an intact copy."
INDEX_BYTES = 4 << 30
"""Largest index: of tens of thousands of ranks."""
DCP = "torch.distributed.checkpoint"
ALLOWED_GLOBALS = {
    f"{DCP}.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    # Megatron-Core keeps the plans of all ranks in the index.
    f"{DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    f"{DCP}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}
BUILT = tuple(
    name
    for module in ("metadata", "planner", "filesystem")
    for name in ALLOWED_GLOBALS[f"{DCP}.{module}"]
)
"""Classes whose instances have a state; the state of a class itself would change it for the whole process."""
REFUSED_OPCODES = (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.NEXT_BUFFER,
)
"""Opcodes that no index needs, some of which do not ask `find_class`."""
UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""Errors of an unpickler that reads arbitrary bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: int
    """Number of boxes in which it is stored."""

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _enum_member(kind: Any, name: str) -> Enum:
    """Look up a member of an enumeration, which Pythons before 3.11.4 pickle as getattr(kind, name)."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        member: Enum = kind[name]
        return member
    raise pickle.UnpicklingError(f"attribute '{name}' of {kind!r} is not allowed")


class _IndexUnpickler(pickle._Unpickler):
    """Unpickler that accepts only the classes of an index: an untrusted checkpoint must not run code.

    It is the one in Python, whose opcodes can be restricted, and whose memory a file's numbers cannot exhaust.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ALLOWED_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def build(self) -> None:
        """Set the state of an instance."""
        instance = self.stack[-2]  # type: ignore[attr-defined]
        if type(instance).__name__ not in BUILT or not type(instance).__module__.startswith(DCP):
            raise pickle.UnpicklingError(f"the state of {type(instance).__name__} is not allowed")
        super().load_build()  # type: ignore[misc]

    def refuse(self) -> None:
        raise pickle.UnpicklingError("an opcode that no index needs is not allowed")

    dispatch = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: build,  # type: ignore[dict-item]
        **dict.fromkeys((opcode[0] for opcode in REFUSED_OPCODES), refuse),  # type: ignore[arg-type]
    }


def decode_index(content: bytes) -> Metadata:
    """Unpickle an index; ValueError with a clause when the bytes are none. Nothing that they name is executed."""
    try:
        metadata = _IndexUnpickler(io.BytesIO(content)).load()
    except UNREADABLE as error:
        raise ValueError(f"is not an index of tensors ({error})") from None
    if not isinstance(metadata, Metadata):
        raise ValueError("is not an index of tensors")
    if vars(metadata).get("storage_meta") is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def read_index(path: Path, sizes: Mapping[str, int] | None = None) -> Metadata:
    """Read the index of the checkpoint at `path`; DamageError when it is not one.

    `sizes`: bytes of each file of the folder of tensors, of which the index has to describe every tensor once.
    """
    name = f"{TENSORS}/{INDEX}"
    try:
        metadata = decode_index(read_run_file(path / name, INDEX_BYTES))
        if sizes is not None:
            check_index(metadata, sizes)
    except FileNotFoundError:
        raise DamageError(path, f"the file {name} is missing", FIX, "missing") from None
    except OSError as error:
        raise DamageError(
            path, f"the file {name} cannot be read: {error.strerror}", FIX, "unreadable"
        ) from None
    except ValueError as error:
        raise DamageError(path, f"{name} {error}", FIX, "unreadable") from None
    return metadata


def check_index(metadata: Metadata, sizes: Mapping[str, int], *, complete: bool = True) -> None:
    """Check every field of an index; ValueError with a clause.

    `sizes`: bytes by the name of each file. `complete`: the boxes of each tensor fill it, and there are only tensors;
    otherwise only what is there is checked.
    """
    entries, storage = vars(metadata).get("state_dict_metadata"), vars(metadata).get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise ValueError("lacks its tensors or where they are stored")
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, info in storage.items():
        _check_storage(index, info, sizes)
        used[info.relative_path].append((info.offset, info.offset + info.length))
    for file, ranges in used.items():
        ranges.sort()
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ranges)):
            raise ValueError(f"stores two boxes at the same place of {file}")
    boxes = 0
    for name, entry in entries.items():
        if isinstance(name, str) and isinstance(entry, BytesStorageMetadata) and not complete:
            continue
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"has an entry {name!r} that is no tensor")
        try:
            _check_tensor(name, entry, storage, complete)
        except AttributeError as error:
            raise ValueError(f"lacks a field of {name} ({error})") from None
        boxes += len(entry.chunks)
    if complete and boxes != len(storage):
        raise ValueError(f"has {boxes} boxes of tensors, and {len(storage)} are stored")


def _check_storage(index: Any, info: Any, sizes: Mapping[str, int]) -> None:
    fields = vars(info) if isinstance(info, _StorageInfo) else {}
    file, offset, length = (fields.get(name) for name in ("relative_path", "offset", "length"))
    if not isinstance(index, MetadataIndex) or not isinstance(file, str):
        raise ValueError("has an entry that says no file")
    check_relative(file)
    if file not in sizes:
        raise ValueError(f"names the file {file}, which the checkpoint does not have")
    if not _are_counts([offset, length]) or offset + length > sizes[file]:  # type: ignore[operator]
        raise ValueError(
            f"names bytes that are not in {file}: {length} from {offset} on, of {sizes[file]}"
        )
    if fields.get("transform_descriptors"):
        raise ValueError(f"says that {file} is transformed, which xscale never does")


def _check_tensor(
    name: str,
    entry: TensorStorageMetadata,
    storage: Mapping[MetadataIndex, _StorageInfo],
    complete: bool,
) -> None:
    """Check that the boxes of a tensor are stored and in it; if `complete`, that they are it."""
    shape = entry.size
    chunks = entry.chunks
    properties = entry.properties
    if not isinstance(properties, TensorProperties) or not isinstance(
        properties.dtype, torch.dtype
    ):
        raise ValueError(f"has no dtype of {name}")
    if not _are_counts(shape) or not isinstance(chunks, list) or math.prod(shape) >= 2**63:
        raise ValueError(f"has no shape of {name}")
    lows, highs = [], []
    for chunk in chunks:
        if (
            not isinstance(chunk, ChunkStorageMetadata)
            or not _are_counts(chunk.offsets)
            or not _are_counts(chunk.sizes)
        ):
            raise ValueError(f"has a box of {name} that is none")
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"has a box of {name} with other dims")
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"has a box of {name} outside its shape {list(shape)}")
        info = storage.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise ValueError(f"says not where a box of {name} is stored")
        elements = math.prod(chunk.sizes)
        if complete and info.length < elements * properties.dtype.itemsize:
            raise ValueError(f"stores a box of {name} in fewer bytes than it has")
        if elements:
            lows.append(list(chunk.offsets))
            highs.append(ends)
    if complete and not _fill(shape, lows, highs):
        raise ValueError(
            f"has boxes of {name} that do not fill its shape {list(shape)}, or overlap"
        )


def _are_counts(values: Any) -> bool:
    return isinstance(values, Sequence) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _fill(shape: Sequence[int], lows: list[list[int]], highs: list[list[int]]) -> bool:
    """Whether boxes inside a tensor fill it without overlap: they are disjoint, and have as many elements."""
    elements = sum(
        math.prod(high - low for low, high in zip(*corners, strict=True))
        for corners in zip(lows, highs, strict=True)
    )
    if elements != math.prod(shape):
        return False
    if len(lows) < 2:
        return True
    low, high = numpy.array(lows), numpy.array(highs)  # [N, dims]
    for number in range(len(lows) - 1):
        later = slice(number + 1, None)
        if ((low[number] < high[later]) & (low[later] < high[number])).all(axis=1).any():
            return False
    return True


def tensor_entries(metadata: Metadata) -> dict[str, TensorEntry]:
    """Return the entry of every tensor of the index, by name."""
    return {
        name: TensorEntry(tuple(stored.size), stored.properties.dtype, len(stored.chunks))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
