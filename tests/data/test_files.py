"""Files of text: found, cut into portions, streamed; and what is refused."""

import gzip
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.core.errors import ConfigError
from xscale.data.source import files
from xscale.data.source.listing import find_files
from xscale.data.source.source import ByteRange


def write(folder: Path, **texts: str) -> list[Path]:
    made = []
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        made.append(file)
    return made


def test_files_folders_and_globs_each_once_in_order(tmp_path: Path) -> None:
    write(tmp_path, a="1", deep__b="2", deep__deeper__c="3", deep__x="4")
    (tmp_path / "deep/.hidden").write_text("5")
    whole = find_files((str(tmp_path / "deep"), str(tmp_path / "a"), str(tmp_path / "**/c")), (), "p")
    assert [one.name for one in whole] == ["b", "c", "x", "a"]
    assert [one.name for one in find_files((str(tmp_path / "deep"),), ("x", "b"), "p")] == ["b", "x"]


@pytest.mark.parametrize(
    ("patterns", "what"),
    [
        ((), "no file, folder or glob"),
        (("none/*.txt",), "'none/\\*.txt' matches no file"),
        ((".empty",), "contains no file"),
    ],
)
def test_what_names_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: tuple[str, ...], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".empty").mkdir()
    with pytest.raises(ConfigError, match=f"p: .*{what}"):
        find_files(patterns, (), "p")


def test_empty_files_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p: the corpus is empty: .*a have no bytes"):
        files.split_into_ranges(write(tmp_path, a=""), "p")
    with pytest.raises(ConfigError, match="not a regular file"):
        files.split_into_ranges([Path("/dev/zero")], "p")


def plain_records(data: bytes, delimiter: bytes) -> list[tuple[int, bytes]]:
    """Records by the definition: a record begins after every occurrence of the delimiter."""
    width = len(delimiter)
    starts = [0] + [at + width for at in range(len(data)) if data[at : at + width] == delimiter]
    found = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        if after is not None:
            found.append((start, data[start : max(start, after - width)]))
        elif start < len(data):
            found.append((start, data[start:]))
    return found


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"b", b"\n", b"\n\n", b"ab"]), max_size=40).map(b"".join),
    delimiter=st.sampled_from([b"\n", b"\n\n", b"aa", b"aba"]),
    step=st.integers(1, 30),
    block=st.integers(1, 9),
)
def test_portions_share_no_record_and_lose_none(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, delimiter: bytes, step: int, block: int
) -> None:
    if not data:
        return
    file = tmp_path_factory.mktemp("records") / "a"
    file.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK", block)
        found = [
            one
            for portion in files.split_into_ranges([file], "p", step)
            for one in files.records(portion, delimiter, 1 << 20)
        ]
    assert found == plain_records(data, delimiter)


def test_compressed_files_are_one_portion_and_read_the_same(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(1000))
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    # Two frames one after the other, as parallel compressors write.
    (tmp_path / "a.zst").write_bytes(zstandard.compress(text[:500]) + zstandard.compress(text[500:]))
    for name in ("a.gz", "a.zst"):
        (portion,) = files.split_into_ranges([tmp_path / name], "p", 10)
        assert list(files.records(portion, b"\n", 100)) == plain_records(text, b"\n")


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
@pytest.mark.parametrize("damage", ["not", "cut", "flipped"])
def test_damaged_compression_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    text = b"".join(b"line %d\n" % (number * number) for number in range(5000))
    good = gzip.compress(text) if name.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress(text)
    middle = len(good) // 2
    bad = {
        "not": b"plainly text\n" * 10,
        "cut": good[:middle],
        "flipped": good[:middle] + bytes(255 - one for one in good[middle : middle + 40]) + good[middle + 40 :],
    }[damage]
    (tmp_path / name).write_bytes(bad)
    (portion,) = files.split_into_ranges([tmp_path / name], "p")
    with pytest.raises(ConfigError, match=name):
        list(files.records(portion, b"\n", 1 << 20))


def test_a_file_that_vanishes_or_shrinks_is_named(tmp_path: Path) -> None:
    (file,) = write(tmp_path, a="word\n" * 100)
    portions = files.split_into_ranges([file], "p", 250)
    file.write_text("word\n" * 60)
    assert list(files.records(portions[0], b"\n", 100))
    with pytest.raises(ConfigError, match=r"/a: the file shrank to 300 bytes .* at least 500"):
        list(files.records(portions[1], b"\n", 100))
    file.unlink()
    with pytest.raises(ConfigError, match="/a: the file disappeared"):
        list(files.records(portions[0], b"\n", 100))


def test_a_record_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", 64)
    (file,) = write(tmp_path, a="short\n" + "x" * 1000)
    with pytest.raises(ConfigError, match="starts at byte 6 is longer than 100 bytes"):
        list(files.records(ByteRange(str(file), 0, 1006, False), b"\n", 100))


def test_a_long_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (file,) = write(tmp_path, a=text)
    (portion,) = files.split_into_ranges([file], "p", None)
    pieces = list(files.line_aligned_chunks(portion, 50))
    assert b"".join(piece for _, piece in pieces).decode() == text
    assert all(piece.endswith(b"\n") and 50 <= len(piece) < 60 for _, piece in pieces[:-1])
    assert [offset for offset, _ in pieces[:2]] == [0, len(pieces[0][1])]


def test_what_is_not_text_is_named_with_its_byte() -> None:
    with pytest.raises(ConfigError, match=r"f: this is binary, not text: byte 103 is NUL"):
        files.decode_utf8(b"abc\0", "f", 100)
    with pytest.raises(ConfigError, match=r"f: this is not UTF-8 text: byte 101 is 0xe9"):
        files.decode_utf8("né".encode("latin-1"), "f", 100)
    assert files.decode_utf8("\ufeffx".encode(), "f", 0) == "x"


PEAK = """
import resource, sys
from xscale.core.errors import ConfigError
from xscale.data.source.{kind} import {name}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read = sum(len(one.text) for one in {name}({name}.Config(paths=(sys.argv[1],), longest=1 << 20)).documents())
    print("read", read)
except ConfigError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def bomb(letters: int, line: int = 0) -> bytes:
    """A text of as many letters, compressed by zst to some 30 KB a gigabyte; with `line`, of lines as long as that."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    part = (b"a" * (line - 1) + b"\n") * ((1 << 22) // line) if line else b"a" * (1 << 22)
    return b"".join(compressor.compress(part) for _ in range(letters // len(part))) + compressor.flush()


def gzip_bomb(letters: int, line: int = 0) -> bytes:
    """The same by gzip, a thousandth of it; members follow each other."""
    part = (b"a" * (line - 1) + b"\n") * ((1 << 24) // line) if line else b"a" * (1 << 24)
    return gzip.compress(part) * (letters // len(part))


@pytest.mark.parametrize("ending", ["zst", "gz"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("line", [0, 1 << 10])
@pytest.mark.sampled(2)
def test_a_small_file_that_decompresses_to_gigabytes_takes_little_memory(
    tmp_path: Path, kind: str, line: int, ending: str
) -> None:
    file = tmp_path / f"a.{kind}.{ending}"
    file.write_bytes((bomb if ending == "zst" else gzip_bomb)(3 << 29, line))
    assert file.stat().st_size < 1 << (18 if ending == "zst" else 22)
    code = PEAK.format(kind=kind, name=kind.title())
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, mebibytes = done.stdout.strip().rsplit("\n", 1)
    assert int(mebibytes) < 300, done.stdout
    if kind == "jsonl" or not line:
        assert str(file) in said, said
        assert "longer than" in said or "not JSON" in said, said
    else:
        assert int(said.split()[1]) > 1 << 30


def test_a_frame_with_a_long_window_says_what_would_work(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(compressor.compress(b"a" * 100) + compressor.flush())
    with (
        pytest.raises(ConfigError, match=r"a\.txt\.zst: .*window of more than 128 MiB.*--long=27"),
        files.open_decompressed(str(tmp_path / "a.txt.zst")) as stream,
    ):
        stream.read()


def test_many_frames_and_blocks_are_one_text(tmp_path: Path) -> None:
    """Frames that end anywhere in the pieces that are decompressed at once."""
    draw = random.Random(0)
    parts = [draw.randbytes(draw.choice([0, 1, 10, 3000, 70_000])) for _ in range(200)]
    (tmp_path / "a.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    with files.open_decompressed(str(tmp_path / "a.zst")) as stream:
        assert stream.read() == b"".join(parts)
