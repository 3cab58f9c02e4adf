"""Forged indices and boxes of a checkpoint, with hashes that fit: set aside for the step before, never half read."""

import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from tests.faults.dying import save_step, tensors
from tests.faults.test_hostile import TOUCHED, Evil, loaded, seal
from xscale.checkpoint.index import check_index, decode_index
from xscale.checkpoint.load import restore
from xscale.checkpoint.save import save
from xscale.checkpoint.tensors import OutsideError, _FileSlice
from xscale.core.errors import ConfigError, FaultError


def test_an_index_names_only_files_of_its_checkpoint(tmp_path: Path) -> None:
    """`/dev/zero` in an index would be read without end."""
    for number, file in enumerate(("/dev/zero", "../state.json", "../../other", "__1_0.distcp")):
        path = save_step(tmp_path / str(number), 1)
        index = pickle.loads((path / "tensors" / ".metadata").read_bytes())
        next(iter(index.storage_data.values())).relative_path = file
        (path / "tensors" / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
        seal(path, "tensors/.metadata")
        with pytest.raises(FaultError, match=r"tensors/\.metadata (names|the path)"):
            loaded(path)
        if "/" in file:
            # Even where somebody's list of files, which says how large each is, has such a name.
            with pytest.raises(ValueError, match="leaves its folder"):
                check_index(index, {file: 2**40})


INDEX_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a box outside": lambda index: setattr(first(index), "offsets", torch.Size([10**6] * len(first(index).offsets))),
    "a box of negative size": lambda index: setattr(first(index), "sizes", torch.Size([-1] * len(first(index).sizes))),
    "a box twice": lambda index: entry(index).chunks.append(first(index)),
    "no boxes": lambda index: entry(index).chunks.clear(),
    "a larger shape": lambda index: setattr(entry(index), "size", torch.Size([n + 1 for n in entry(index).size])),
    "a huge shape": lambda index: setattr(entry(index), "size", torch.Size([2**40] * len(entry(index).size))),
    "no dtype": lambda index: setattr(entry(index).properties, "dtype", "float32"),
    "an offset beyond the file": lambda index: setattr(stored(index), "offset", 2**40),
    "a negative offset": lambda index: setattr(stored(index), "offset", -1),
    "no length": lambda index: setattr(stored(index), "length", 0),
    "a length of another type": lambda index: setattr(stored(index), "length", "long"),
    "a transformed file": lambda index: setattr(stored(index), "transform_descriptors", ["stream.zstd"]),
    "no storage": lambda index: index.storage_data.clear(),
    "storage of another type": lambda index: setattr(index, "storage_data", [1]),
    "an object": lambda index: index.state_dict_metadata.update(x=BytesStorageMetadata()),
    "no tensors": lambda index: setattr(index, "state_dict_metadata", None),
    "a tensor that is text": lambda index: index.state_dict_metadata.update(x="y"),
}


def entry(index: Any) -> Any:
    return next(entry for entry in index.state_dict_metadata.values() if len(entry.size))


def first(index: Any) -> Any:
    return entry(index).chunks[0]


def stored(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


def matrix(index: Any) -> Any:
    return index.state_dict_metadata["optimizer.a"]


def place(index: Any) -> Any:
    """Where the only box of the matrix is stored."""
    return index.storage_data[MetadataIndex("optimizer.a", torch.Size([0, 0]))]


def store_at_end(index: Any, name: str, *offsets: int) -> None:
    index.storage_data[MetadataIndex(name, torch.Size(offsets))] = replace(place(index), offset=2**30)


def overlap(index: Any) -> None:
    """Two boxes with as many elements as the matrix, one of whose rows is in both."""
    matrix(index).chunks = [
        ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([rows, 7])) for first, rows in ((0, 3), (2, 2))
    ]
    store_at_end(index, "optimizer.a", 2, 0)


CLAUSES: dict[str, Callable[[Any], Any]] = {
    "outside its shape": lambda index: setattr(matrix(index).chunks[0], "sizes", torch.Size([7, 5])),
    "do not fill its shape": overlap,
    "at the same place of": lambda index: setattr(place(index), "offset", place(index).offset - 1),
    "boxes of tensors, and": lambda index: store_at_end(index, "x", 0),
    "in fewer bytes than it has": lambda index: setattr(place(index), "length", 5 * 7 * 4 - 1),
    "has no shape of optimizer.a": lambda index: setattr(matrix(index), "size", torch.Size([2**40, 2**40])),
    "with other dims": lambda index: setattr(matrix(index).chunks[0], "sizes", torch.Size([35])),
    "that is none": lambda index: setattr(matrix(index), "chunks", [1]),
    "has no dtype of": lambda index: setattr(matrix(index).properties, "dtype", "float32"),
    "that is no tensor": lambda index: index.state_dict_metadata.update({"optimizer.a": BytesStorageMetadata()}),
    "says not where a box": lambda index: index.storage_data.pop(MetadataIndex("optimizer.a", torch.Size([0, 0]))),
    "names bytes that are not in": lambda index: setattr(place(index), "offset", 2**50),
    "which the checkpoint does not have": lambda index: setattr(place(index), "relative_path", "__9_0.distcp"),
    "says that __0_0.distcp is transformed": lambda index: setattr(place(index), "transform_descriptors", ["zstd"]),
    "lacks a field of optimizer.a": lambda index: delattr(matrix(index), "chunks"),
}
"""Clause of the message -> a change that no other check refuses, in files as long as one likes."""


@pytest.mark.parametrize("clause", CLAUSES)
def test_each_check_of_an_index_finds_what_no_other_does(tmp_path: Path, clause: str) -> None:
    index = pickle.loads((save_step(tmp_path, 1) / "tensors" / ".metadata").read_bytes())
    sizes = {"__0_0.distcp": 2**40}
    check_index(index, sizes)
    CLAUSES[clause](index)
    with pytest.raises(ValueError, match=clause):
        check_index(index, sizes)


@pytest.mark.parametrize("change", INDEX_CHANGES)
def test_a_forged_index_is_set_aside(tmp_path: Path, change: str) -> None:
    for step in (1, 2):
        path = save_step(tmp_path, step)
    index = pickle.loads((path / "tensors" / ".metadata").read_bytes())
    INDEX_CHANGES[change](index)
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    seal(path, "tensors/.metadata")
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    restored = restore(tmp_path, held)
    assert restored.loaded is not None
    assert restored.loaded.step == 1
    assert "set aside as bad-step-00000002-" in restored.reasons[0]
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors(1).items())


WRONG_BOXES = {
    "dtype": "it is torch.int32, and the index says torch.float32",
    "dims": "its shape is",
    "larger": "its shape is",
    "a list": "it is no tensor",
    "code": "is not the tensor that .metadata describes (it names posix.system",
}
"""Change -> what the message says of it."""


@pytest.mark.parametrize("change", [*WRONG_BOXES, "none"])
def test_a_box_is_what_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The same bytes under another dtype would be read as numbers of that one, without a word."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        path = save_step(tmp_path, step)
    index = pickle.loads((path / "tensors" / ".metadata").read_bytes())
    index.storage_data = dict(sorted(index.storage_data.items(), key=lambda item: item[1].offset))
    info = next(info for place, info in index.storage_data.items() if len(place.offset) == 2)
    file = path / "tensors" / info.relative_path
    box = torch.load(io.BytesIO(file.read_bytes()[info.offset : info.offset + info.length]), weights_only=True)
    assert box.dtype == torch.float32
    wrong = {"dtype": box.view(torch.int32), "dims": box.reshape(-1), "a list": [box], "code": [box, Evil()]}
    wrong["larger"] = torch.cat([box, box])
    other = box.clone() if change == "none" else wrong[change]
    stream = io.BytesIO()
    torch.save(other, stream)
    info.offset, info.length = file.stat().st_size, len(stream.getvalue())
    with file.open("ab") as end:
        end.write(stream.getvalue())
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    for name in ("tensors/.metadata", f"tensors/{file.name}"):
        seal(path, name)
    held = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    restored = restore(tmp_path, held)
    assert restored.loaded is not None
    assert restored.loaded.step == (2 if change == "none" else 1)
    if change != "none":
        assert WRONG_BOXES[change] in restored.reasons[0]
        assert "set aside as bad-step-00000002-" in restored.reasons[0]
    assert not (tmp_path / TOUCHED).exists()


def test_an_index_of_megatron_names_only_bytes_of_its_folder(tmp_path: Path) -> None:
    """The library opens what the index names, wherever it is: `/dev/zero` would be read without end."""
    pytest.importorskip("megatron.core.dist_checkpointing")
    from xscale.commands.checkpoints import gpt_model

    folder = save_step(tmp_path, 1) / "tensors"
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    content = (folder / ".metadata").read_bytes()
    assert gpt_model.contents(folder).keys() == tensors(1).keys()
    for field, value in {"relative_path": "/dev/zero", "offset": 2**40, "length": -1}.items():
        index = pickle.loads(content)
        setattr(stored(index), field, value)
        (folder / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
        with pytest.raises(ConfigError, match=r"leaves its folder|names bytes that are not in"):
            gpt_model.contents(folder)


def test_a_compressed_tensor_is_never_inflated(tmp_path: Path) -> None:
    """A few kilobytes of zeros, deflated, would ask for all of the memory."""
    for step in (1, 2):
        path = save_step(tmp_path, step)
    index = pickle.loads((path / "tensors" / ".metadata").read_bytes())
    file, compressed = path / "tensors" / stored(index).relative_path, io.BytesIO()
    start, end = stored(index).offset, stored(index).offset + stored(index).length
    # Saved again, since xscale writes no CRC-32, which zipfile asks for.
    saved = io.BytesIO()
    torch.save(torch.load(io.BytesIO(file.read_bytes()[start:end]), weights_only=True), saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as bomb:
        for info in archive.infolist():
            bomb.writestr(info.filename, archive.read(info))
        # An index that stores a box in fewer bytes than it has is refused without a look at them.
        bomb.writestr("archive/padding", os.urandom(end - start))
    stored(index).offset, stored(index).length = file.stat().st_size, len(compressed.getvalue())
    with file.open("ab") as stream:
        stream.write(compressed.getvalue())
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    for name in ("tensors/.metadata", f"tensors/{file.name}"):
        seal(path, name)
    with pytest.raises(FaultError, match="its archive is compressed"):
        loaded(path)
    restored = restore(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()})
    assert restored.loaded is not None
    assert restored.loaded.step == 1


SMALL = {"model.a": torch.arange(5.0), "model.b": torch.ones(2, 3)}
RECORDS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
"""First bytes of the records of an archive."""


def torn(content: bytes, draw: random.Random) -> bytes:
    """`content`, as long, with bytes of the archives in it cut off, moved, or set in a record of theirs."""
    change = draw.choice(("end", "hole", "record", "shift"))
    at = draw.randrange(len(content))
    if change == "end":
        return content[:at].ljust(len(content), b"\0")
    if change == "hole":
        length = min(draw.randrange(1, 200), len(content) - at)
        return content[:at] + bytes(length) + content[at + length :]
    if change == "shift":
        moved = draw.randrange(1, 60)
        return (content[:at] + bytes(moved) + content[at:])[: len(content)]
    starts = [start for start in range(len(content)) if content.startswith(RECORDS, start)]
    at = min(draw.choice(starts) + draw.randrange(4, 56), len(content) - 1)
    return content[:at] + bytes([draw.choice((0, 1, 0x7F, 0xFF, content[at] ^ 1))]) + content[at + 1 :]


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.nightly)], ids=len)
def test_a_torn_archive_in_a_shard_is_damage(tmp_path: Path, seeds: range) -> None:
    """With hashes that fit, as of a forged one: the checkpoint before it is taken, and no disk is blamed."""
    whole = tmp_path / "whole"
    for step in (1, 2):
        save(whole, step, SMALL, {"step": step}, {})
    file = "step-00000002/tensors/__0_0.distcp"
    content = (whole / file).read_bytes()
    taken = dict.fromkeys((1, 2), 0)
    for seed in seeds:
        folder = tmp_path / "folder"
        shutil.copytree(whole, folder)
        (folder / file).write_bytes(torn(content, random.Random(seed)))
        seal(folder / "step-00000002", "tensors/__0_0.distcp")
        held = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
        try:
            restored = restore(folder, held)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        assert restored.loaded is not None, seed
        taken[restored.loaded.step] += 1
        if restored.loaded.step == 1:
            assert all(torch.equal(held[name], tensor) for name, tensor in SMALL.items()), seed
            assert "set aside as bad-step-00000002-" in restored.reasons[0], seed
        shutil.rmtree(folder)
    assert taken[1] > len(seeds) // 3, taken


ENDS = {
    "a record of 64 bits before the start": b"PK\x06\x07" + bytes(16) + b"PK\x05\x06" + bytes(18),
    "a directory before the start": b"PK\x05\x06" + bytes(8) + b"\xff" * 8 + bytes(2),
    "an end alone": b"PK\x05\x06" + bytes(18),
    "nothing": bytes(42),
}
"""Ends of archives that name positions outside of them."""


@pytest.mark.parametrize("end", ENDS)
def test_an_archive_without_its_beginning_is_damage(tmp_path: Path, end: str) -> None:
    """A reader seeks in front of the box, for which a file has an error that a broken disk has too."""
    for step in (1, 2):
        path = save(tmp_path, step, SMALL, {"step": step}, {})
    index = pickle.loads((path / "tensors" / ".metadata").read_bytes())
    box = index.storage_data[MetadataIndex("model.a", torch.Size([0]))]
    box.length = len(ENDS[end])
    with (path / "tensors" / "__0_0.distcp").open("r+b") as shard:
        shard.seek(box.offset)
        shard.write(ENDS[end])
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    for name in ("tensors/.metadata", "tensors/__0_0.distcp"):
        seal(path, name)
    held = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    restored = restore(tmp_path, held)
    assert restored.loaded is not None
    assert restored.loaded.step == 1
    assert "set aside as bad-step-00000002-unreadable" in restored.reasons[0]


@pytest.mark.parametrize("at", [42, 43, 2**40, 2**62, 2**63, 2**70])
def test_nothing_is_read_behind_a_box(tmp_path: Path, at: int) -> None:
    """Not even where a file would have an error, which would be taken for the disk's."""
    (tmp_path / "file").write_bytes(bytes(100))
    with (tmp_path / "file").open("rb") as file:
        box = _FileSlice(file, 10, 42)
        assert box.seek(at) == at
        assert box.read(8) == b""
        assert box.seek(40) == 40
        assert box.read(8) == bytes(2)
        with pytest.raises(OutsideError):
            box.seek(-43, 2)


@pytest.mark.parametrize(
    "content", [b"\x80\x02G\x00", b"\x80\x02M\x00", b"\x80\x02J", b"\x80\x04\x95\x00", b"\x80\x02\x8a"]
)
def test_an_index_that_ends_within_a_number_is_none(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not an index of tensors"):
        decode_index(content)
