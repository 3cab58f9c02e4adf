"""The .bin/.idx pair: byte for byte what Megatron writes, read as it reads; damage is named."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.core.errors import ConfigError
from xscale.data import indexed
from xscale.data.indexed import HEADER, IndexedDataset, IndexedWriter, index_bytes, suffixed, token_type

DOCUMENTS = [[1, 2, 3], [4], [65499, 0, 7, 7]]


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> dict[str, str]:
    writer = IndexedWriter(prefix, dtype)
    for one in documents:
        writer.add(one)
    return writer.finish()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_writes_the_same_bytes_and_reads_ours(tmp_path: Path, dtype: Any) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    hashes = write(tmp_path / "ours", DOCUMENTS, dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for one in DOCUMENTS:
        builder.add_document(torch.tensor(one), [len(one)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        data = (tmp_path / f"ours{ending}").read_bytes()
        assert data == (tmp_path / f"theirs{ending}").read_bytes()
        assert hashes[f"ours{ending}"] == hashlib.sha256(data).hexdigest()
    read = IndexedDataset(str(tmp_path / "ours"))
    assert [one.tolist() for one in read[:]] == DOCUMENTS
    assert read.document_indices.tolist() == [0, 1, 2, 3]
    for vocabulary in (100, 65499, 65500, 100_000):
        assert token_type(vocabulary) == DType.optimal_dtype(vocabulary)


def test_documents_of_several_sequences_and_a_multimodal_index_are_read(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32, multimodal=True)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3], [0, 0])
    builder.add_document(torch.tensor([6]), [1], [0])
    builder.finalize(str(tmp_path / "a.idx"))
    read = IndexedDataset(tmp_path / "a")
    assert [read.document(index).tolist() for index in range(len(read))] == [[1, 2, 3, 4, 5], [6]]


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65499), max_size=9), max_size=9))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "dotted.name"
    write(prefix, documents)
    read = IndexedDataset(prefix)
    assert [read.document(index).tolist() for index in range(len(read))] == documents
    assert not list(prefix.parent.glob("*.part"))


def test_an_abandoned_pair_leaves_nothing(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", np.uint16)
    writer.add([1])
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_bin_of_another_length_names_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    file = tmp_path / "a.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-2])
    with pytest.raises(ConfigError, match=r"a\.bin: it is 14 bytes long, but a\.idx describes 8 tokens, 16 bytes"):
        IndexedDataset(tmp_path / "a")
    file.unlink()
    with pytest.raises(ConfigError, match=r"a\.bin: the tokens cannot be read: No such file"):
        IndexedDataset(tmp_path / "a")


def changed(index: bytes, **fields: int) -> bytes:
    magic, version, code, sequences, bounds = HEADER.unpack(index[: HEADER.size])
    now = {"version": version, "code": code, "sequences": sequences, "bounds": bounds} | fields
    return HEADER.pack(magic, *now.values()) + index[HEADER.size :]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda index: b"PK" + index[2:], "not a Megatron index"),
        (lambda index: index[:20], "not a Megatron index"),
        (lambda index: changed(index, version=2), "version 2"),
        (lambda index: changed(index, code=9), "type code 9"),
        (lambda index: changed(index, code=7), "type code 7"),
        (lambda index: index[:-8], "94 bytes long, but its 3 sequences and 4 bounds need 102"),
        (lambda index: index[:46] + b"\1" + index[47:], "are not contiguous"),
        (lambda index: index[:-8] + bytes(8), "do not cover"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, damage: Any, what: str) -> None:
    write(tmp_path / "a", DOCUMENTS)
    file = suffixed(tmp_path / "a", ".idx")
    IndexedDataset(tmp_path / "a")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=what):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, ending: str) -> None:
    writer = IndexedWriter(tmp_path / "a", np.uint16)
    writer.add([1, 2, 3])
    writer.finish()
    (tmp_path / f"a{ending}").unlink()
    os.mkfifo(tmp_path / f"a{ending}")
    with pytest.raises(ConfigError, match=rf"a\{ending}: .*this is not a regular file"):
        IndexedDataset(tmp_path / "a")


def test_negative_lengths_are_refused(tmp_path: Path) -> None:
    """They would fit the offsets, which are their sums."""
    content = index_bytes(np.array([5, -2, 3], dtype=np.int32), np.uint16)
    (tmp_path / "a.idx").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(bytes(12))
    with pytest.raises(ConfigError, match="a sequence has a negative length"):
        IndexedDataset(tmp_path / "a")


LARGE = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from xscale.data.corpus.prepared import Split
from xscale.data.indexed import IndexedDataset
from xscale.data.samples.packed import PackedDataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = PackedDataset(Split("train", IndexedDataset(Path(sys.argv[1])), 0, 100_000_000), 8)
tokens, documents = data.chunk(1)
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(kilobytes, len(data.split.indexed), tokens.tolist(), documents.tolist())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_an_index_of_a_hundred_million_documents_takes_no_memory(tmp_path: Path) -> None:
    """Opened, and a sample read, by a process of its own: it maps the index, most of which here are holes in a file."""
    documents, tokens = 100_000_000, 24
    prefix = tmp_path / "large"
    np.arange(tokens, dtype=np.uint16).tofile(suffixed(prefix, ".bin"))
    with suffixed(prefix, ".idx").open("wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        # All documents are empty but for the last two, of 12 tokens each.
        stream.seek(HEADER.size + 4 * (documents - 2))
        stream.write(np.array([12, 12], "<i4").tobytes())
        stream.seek(8 * (documents - 1), os.SEEK_CUR)
        stream.write(np.array([24], "<i8").tobytes())
        # A document's first sequence has its number; those before begin at token 0, whatever their number.
        last = np.arange(documents - 4096, documents + 1, dtype="<i8")
        stream.seek(HEADER.size + 12 * documents + 8 * (documents - 4096))
        stream.write(last.tobytes())
    ran = subprocess.run(
        [sys.executable, "-c", LARGE, str(prefix)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    kilobytes, rest = ran.stdout.split(" ", 1)
    assert rest.strip() == f"{documents} {[*range(8, 17)]} {[0] * 4 + [1] * 5}"
    assert int(kilobytes) < 50_000


def test_damage_within_a_large_index_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a small index with the same damage is refused when it is opened."""
    prefix = tmp_path / "a"
    write(prefix, [[number] * 3 for number in range(40)])
    with suffixed(prefix, ".idx").open("r+b") as stream:
        stream.seek(HEADER.size + 4 * 40 + 8 * 20)
        stream.write(np.array([-6], "<i8").tobytes())
    with pytest.raises(ConfigError, match="the sequences are not contiguous"):
        IndexedDataset(prefix)
    for name, value in (("SMALL_INDEX", 10), ("WINDOWS", 2), ("WINDOW", 4)):
        monkeypatch.setattr(indexed, name, value)
    opened = IndexedDataset(prefix)
    assert opened.document(3).tolist() == [3] * 3
    with pytest.raises(ConfigError, match="the sequences are not contiguous"):
        opened.document(20)
    with pytest.raises(ConfigError, match="the sequences are not contiguous"):
        opened.document(19)


def test_starts_are_read_as_an_array_is(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [], [4], [5, 6]])
    opened = IndexedDataset(tmp_path / "a")
    starts = np.array([0, 3, 3, 4, 6])
    for found in (opened.starts, opened.sequence_starts):
        assert len(found) == len(starts)
        assert np.array_equal(found, starts)
        for key in (slice(1, 3), slice(None, -1, 2), slice(4, None), slice(3, 3), np.array([4, 0]), [1, 3]):
            assert np.array_equal(found[key], starts[key])
        assert [found[index] for index in (0, -1, 2)] == [0, 6, 3]
        with pytest.raises(IndexError):
            found[5]
        for token in range(8):
            for side in ("left", "right"):
                assert found.search(token, side) == np.searchsorted(starts, token, side)
