"""Files by `torch.save` from anyone: tensors are read without running code, and none is larger than its bytes."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor


def load_torch_file(file: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Load what `torch.save` wrote, on the CPU; `mmap`: map the bytes of an archive and read them when they are used.

    Raises OSError, ValueError, RuntimeError and other errors of an unpickler (`index.UNREADABLE`) for what is no such
    file, is compressed (a few kilobytes can inflate to all of the memory), or holds what is no plain tensor.
    """
    # Torch before 1.6 wrote no archives.
    archived = zipfile.is_zipfile(file)
    if archived:
        _rewind(file)
        try:
            with zipfile.ZipFile(file) as archive:
                _check_entries(archive)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"it is not an archive of torch.save: {error}") from None
    _rewind(file)
    content = torch.load(
        cast(IO[bytes], file), map_location="cpu", weights_only=True, mmap=mmap and archived
    )
    for tensor in _tensors(content):
        _check(tensor)
    return content


def _check_entries(archive: zipfile.ZipFile) -> None:
    """Raise ValueError, BadZipFile or RuntimeError for an entry that is compressed, or whose record is another's."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its archive is compressed")
    for entry in entries:
        # Compares the names: torch would read the bytes of a tensor wherever its entry says that they are.
        archive.open(entry).close()


def _rewind(file: Path | IO[bytes]) -> None:
    if not isinstance(file, Path):
        file.seek(0)


def _tensors(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries and lists, each container once: a pickle may hold itself."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item


def _check(tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose values are not all in the file, such as one that repeats a byte."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(
            f"it holds a tensor that is not plain ({tensor.layout}, {tensor.device.type})"
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is larger than its bytes in the file"
        )
