"""Shards whose archives are torn or forged in each way that their format has, with hashes that fit: each rank takes the
checkpoint before."""

import io
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed import distributed
from tests.faults.test_hostile import seal
from xscale.checkpoint.errors import consensus
from xscale.checkpoint.load import restore
from xscale.checkpoint.save import save

LOCAL, ENTRY, END, END_64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"
"""First bytes of the header of a record, of its entry in the central directory, and of both ends of the archive."""
VALUES = 16
"""Elements of the tensor, and of the box that is torn on one rank; each of two ranks has half of it."""


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def at(content: bytes, record: bytes, offset: int, value: bytes, number: int = 0) -> bytes:
    """Set bytes of the `number`-th record that begins with `record`."""
    start = -1
    for _ in range(number + 1):
        start = content.index(record, start + 1)
    return content[: start + offset] + value + content[start + offset + len(value) :]


def rebuilt(
    content: bytes,
    change: Callable[[str, bytes], bytes | None] = lambda name, data: data,
    method: Callable[[str], int] = lambda name: zipfile.ZIP_STORED,
) -> bytes:
    """The archive with other records, None for one that is left out, compressed by `method`."""
    stream = io.BytesIO()
    # Saved again, since xscale writes no CRC-32, which zipfile asks for.
    with zipfile.ZipFile(io.BytesIO(saved(box_of(content)))) as archive, zipfile.ZipFile(stream, "w") as other:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if (data := change(name, archive.read(info))) is not None:
                other.writestr(info.filename, data, compress_type=method(name))
    return stream.getvalue()


def before_archives(content: bytes) -> bytes:
    return saved(box_of(content), _use_new_zipfile_serialization=False)


def without(content: bytes, name: str) -> bytes:
    return rebuilt(content, lambda of, data: None if of == name else data)


def record(content: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    return rebuilt(content, lambda of, data: change(data) if of == name else data)


def compressed(content: bytes, name: str, method: int) -> bytes:
    return rebuilt(content, method=lambda of: method if of == name else zipfile.ZIP_STORED)


def twice(content: bytes) -> bytes:
    """Two records of one name, with other numbers."""
    stream = io.BytesIO(rebuilt(content))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x01.")
    return stream.getvalue()


def sixty_four_bits(content: bytes) -> bytes:
    """Sizes in a field of 64 bits, which say more than there is."""
    where = content.index(ENTRY)
    name = struct.unpack_from("<H", content, where + 28)[0]
    extra = struct.pack("<HHQQ", 1, 16, 2**62, 2**62)
    entry = bytearray(content[where : where + 46 + name])
    entry[20:28], entry[30:32] = b"\xff" * 8, struct.pack("<H", len(extra))
    rest = where + 46 + name + sum(struct.unpack_from("<HH", content, where + 30))
    return content[:where] + bytes(entry) + extra + content[rest:]


def box_of(content: bytes) -> Tensor:
    box: Tensor = torch.load(io.BytesIO(content), weights_only=True)
    return box


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "another dtype of the same bytes": lambda box: box.view(torch.int32),
    "a dtype of half the bytes": lambda box: box.half(),
    "another shape": lambda box: box.reshape(2, -1),
    "one value more": lambda box: torch.cat([box, box[:1]]),
    "one value that repeats": lambda box: box[:1].clone().expand(box.shape),
    "a sparse tensor": lambda box: box.to_sparse(),
    "a tensor on no device": lambda box: box.to("meta"),
    "a tensor in a list": lambda box: [box],
    "a number": lambda box: 3.0,
    "nothing": lambda box: None,
}
"""Other contents, of which torch.save writes a sound archive."""
TORN: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda content: content[:-1],
    "cut in half": lambda content: content[: len(content) // 2],
    "cut before the central directory": lambda content: content[: content.index(ENTRY)],
    "cut before its end": lambda content: content[: content.index(END)],
    "cut at the start": lambda content: content[len(content) // 2 :],
    "zeros": lambda content: bytes(len(content)),
    "an end alone": lambda content: content[content.index(END) :].ljust(len(content), b"\0"),
    "the directory removed": lambda content: content[: content.index(ENTRY)] + content[content.index(END) :],
    "the records removed": lambda content: content[content.index(ENTRY) :].ljust(len(content), b"\0"),
    "no entries": lambda content: at(content, END_64, 24, bytes(16)),
    "2^62 entries": lambda content: at(content, END_64, 24, struct.pack("<QQ", 2**62, 2**62)),
    "a directory of no bytes": lambda content: at(content, END_64, 40, bytes(8)),
    "a directory of 2^62 bytes": lambda content: at(content, END_64, 40, struct.pack("<Q", 2**62)),
    "a directory beyond the end": lambda content: at(content, END_64, 48, struct.pack("<Q", 2**62)),
    "a directory at the start": lambda content: at(content, END_64, 48, bytes(8)),
    "no end of 64 bits where it should be": lambda content: content.replace(END_64, b"\0\0\0\0"),
    "a directory that is none": lambda content: content.replace(ENTRY, b"\0\0\0\0"),
    "headers that are none": lambda content: content.replace(LOCAL, b"\0\0\0\0"),
    "an entry of another record": lambda content: at(content, ENTRY, 42, struct.pack("<I", 0), 4),
    "an entry beyond the end": lambda content: at(content, ENTRY, 42, struct.pack("<I", 2**31)),
    "a record of 2 GiB": lambda content: at(content, ENTRY, 20, struct.pack("<II", 2**31, 2**31), 4),
    "a record of no bytes": lambda content: at(content, ENTRY, 20, bytes(8), 4),
    "a record of 2^62 bytes": sixty_four_bits,
    "a name of 65,535 bytes": lambda content: at(content, ENTRY, 28, b"\xff\xff"),
    "an encrypted record": lambda content: at(content, ENTRY, 8, b"\x01"),
    "a record that says it is deflated": lambda content: at(content, ENTRY, 10, b"\x08", 4),
    "a record compressed by no known method": lambda content: at(content, ENTRY, 10, b"\x63"),
    "no tensor's description": lambda content: without(content, "data.pkl"),
    "no tensor's bytes": lambda content: without(content, "data/0"),
    "no version": lambda content: without(content, "version"),
    "two records of a name": twice,
    "half of the bytes": lambda content: record(content, "data/0", lambda data: data[: len(data) // 2]),
    "more than the bytes": lambda content: record(content, "data/0", lambda data: data + b"more"),
    "no bytes": lambda content: record(content, "data/0", lambda data: b""),
    "half of the description": lambda content: record(content, "data.pkl", lambda data: data[: len(data) // 2]),
    "another byte order": lambda content: record(content, "byteorder", lambda data: b"middle"),
    "a version that is none": lambda content: record(content, "version", lambda data: b"many"),
    "a version of later": lambda content: record(content, "version", lambda data: b"999"),
    "deflated bytes": lambda content: compressed(content, "data/0", zipfile.ZIP_DEFLATED),
    "a deflated description": lambda content: compressed(content, "data.pkl", zipfile.ZIP_DEFLATED),
    "bytes by bzip2": lambda content: compressed(content, "data/0", zipfile.ZIP_BZIP2),
    "bytes by LZMA": lambda content: compressed(content, "data/0", zipfile.ZIP_LZMA),
    "the format before archives, cut": lambda content: before_archives(content)[:-5],
}
"""How an archive of one box is changed; whatever the length is then, the index says it."""
for what, other in OTHERS.items():
    TORN[what] = lambda content, other=other: saved(other(box_of(content)))  # type: ignore[misc]

WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "nothing is changed": lambda content: content,
    # xscale writes none, and no reader of tensors looks at it: the manifest has the hash of the file.
    "a wrong CRC-32": lambda content: at(content, ENTRY, 16, b"\x12\x34\x56\x78", 4),
    "records in an archive by zipfile": rebuilt,
    "the format before archives": lambda content: before_archives(content),
    "an end of 32 bits that differs from that of 64": lambda content: at(content, END, 8, bytes(12)),
}
"""Changes after which the box is still the tensor that the index says."""


def in_index(step: Path, change: Callable[[Any], None]) -> None:
    """Change the index, and only that."""
    file = step / "tensors" / ".metadata"
    index = pickle.loads(file.read_bytes())
    change(index)
    file.write_bytes(pickle.dumps(index, protocol=4))
    seal(step, "tensors/.metadata")


def tear(step: Path, place: MetadataIndex, change: Callable[[bytes], bytes]) -> None:
    """Change the archive of a box, the place of all boxes behind it, and the hashes in the manifest."""
    index = pickle.loads((step / "tensors" / ".metadata").read_bytes())
    box = index.storage_data[place]
    shard = step / "tensors" / box.relative_path
    content = shard.read_bytes()
    archive = change(content[box.offset : box.offset + box.length])
    shard.write_bytes(content[: box.offset] + archive + content[box.offset + box.length :])
    added = len(archive) - box.length

    def move(index: Any) -> None:
        for other in index.storage_data.values():
            if other.relative_path == box.relative_path and other.offset > box.offset:
                other.offset += added
        index.storage_data[place].length = len(archive)

    in_index(step, move)
    seal(step, f"tensors/{shard.name}")


def values(step: int) -> Tensor:
    return torch.arange(float(VALUES)) + 100 * step


def sharded(step: int) -> dict[str, Tensor]:
    """A tensor of which each rank has a shard, and one that all have."""
    full = values(step)
    ranks = consensus()
    if ranks.world > 1:
        full = distribute_tensor(full, init_device_mesh("cpu", (ranks.world,)), [Shard(0)])
    return {"model.a": full, "model.b": torch.full((3, 2), float(step))}


def equal(held: dict[str, Tensor], step: int) -> bool:
    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return all(torch.equal(local(held[name]), local(tensor)) for name, tensor in sharded(step).items())


def check(
    folder: Path, changes: dict[str, Callable[[bytes], bytes]], place: MetadataIndex, takes: int, message: str
) -> None:
    """Resume beside each change of the newest checkpoint. Collective."""
    ranks, wrong = consensus(), []
    for step in (1, 2):
        save(folder / "whole", step, sharded(step), {"step": step}, {})
    for number, (what, change) in enumerate(changes.items()):
        copy = folder / str(number)

        def make(copy: Path = copy, change: Callable[[bytes], bytes] = change) -> None:
            shutil.copytree(folder / "whole", copy)
            tear(copy / "step-00000002", place, change)

        ranks.on_rank0(copy, make)
        held = {name: torch.zeros_like(tensor) for name, tensor in sharded(0).items()}
        restored = restore(copy, held)
        taken = restored.loaded and restored.loaded.step
        said = restored.reasons[0] if restored.reasons else ""
        if taken != takes or not equal(held, takes) or message not in said or "disk" in said:
            wrong.append(f"{what}: step {taken}, {said}")
    assert not wrong, "\n".join(wrong)


ASIDE = "set aside as bad-step-00000002-"


def test_a_torn_archive_is_set_aside(tmp_path: Path) -> None:
    check(tmp_path, TORN, MetadataIndex("model.a", torch.Size([0])), 1, ASIDE)


def test_an_archive_with_the_tensor_is_taken(tmp_path: Path) -> None:
    """The control: what is as good as what xscale writes is no damage."""
    check(tmp_path, WHOLE, MetadataIndex("model.a", torch.Size([0])), 2, "")


QUICK = ("cut in half", "an entry of another record", "no tensor's bytes", "deflated bytes", "another shape")


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(TORN), marks=pytest.mark.long)], ids=len)
@distributed(ranks=2)
def test_the_archive_of_one_rank_is_torn(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Only the rank that reads the box meets the fault, and both take the step before."""
    changes = {name: TORN[name] for name in names}
    check(tmp_path, changes, MetadataIndex("model.a", torch.Size([VALUES // 2])), 1, ASIDE)


@distributed(ranks=2)
def test_the_archives_of_two_ranks_are_whole(tmp_path: Path) -> None:
    check(tmp_path, WHOLE, MetadataIndex("model.a", torch.Size([VALUES // 2])), 2, "")
