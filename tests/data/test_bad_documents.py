"""Documents that cannot be read: refused with their place, or skipped, counted and named, whoever reads the corpus."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import words
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.inspect import inspect
from xscale.data.corpus.manifest import MANIFEST
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import prepared_folder
from xscale.data.source import files
from xscale.data.source.jsonl import Jsonl
from xscale.data.source.text import Text
from xscale.data.tokenizer.byte import Byte

LINES: dict[int, tuple[bytes, str]] = {
    4: (b"not an object", "not JSON"),
    9: (b'{"text": ', "not JSON"),
    17: (b'["text"]', "not an object"),
    30: (b'{"txet": "x"}', "without the field 'text'"),
    31: (b'{"text": 3}', "the field 'text' is no string"),
    42: (b'{"text": "a\\u0000b"}', "the field 'text' is not text"),
    55: (b'{"text": "\xff\xfe"}', "not UTF-8"),
    60: (json.dumps({"text": "long " * 400}).encode(), "longer than `longest`"),
    61: (b'{"a": ' * 2000 + b"1" + b"}" * 2000, "longer than `longest`"),
    77: (b"\x00\x01", "binary"),
}
"""Number of a line of the corpus, from 1 -> its bytes, and why they are no document."""
GOOD = [words(seed, 30) for seed in range(200)]


def corpus(folder: Path, *, bad: bool = True) -> Path:
    """200 documents in two files, with the lines above among those of the first."""
    folder.mkdir()
    rows = [json.dumps({"text": text}).encode() for text in GOOD]
    first, second = rows[:100], rows[100:]
    for number in sorted(LINES) if bad else ():
        first.insert(number - 1, LINES[number][0])
    for name, lines in (("a", first), ("b", second)):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def config(folder: Path, paths: Path, **source: Any) -> DataConfig:
    settings = {"paths": (str(paths),), "longest": 1000, **source}
    return DataConfig(
        source=Jsonl.Config(**settings), tokenizer=Byte.Config(), folder=str(folder), validation=0.1, sequence_length=16
    )


@pytest.mark.parametrize("number", LINES)
def test_each_is_refused_by_default_with_its_place(number: int, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + LINES[number][0] + b'\n{"text": "good"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl") as caught:
        prepare(config(tmp_path / "data", file), processes=1, progress=False)
    # The line begins at byte 17, and its first byte that is not UTF-8 is 27.
    assert any(place in str(caught.value) for place in (":17: ", "byte 17 ", "byte 27 ")), str(caught.value)


def test_they_are_skipped_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = corpus(tmp_path / "corpus")
    skipping = config(tmp_path / "data", paths, bad="skip", max_bad_fraction=0.05)
    prepared = prepare(skipping, processes=1)
    assert prepared.manifest is not None
    entry = json.loads((prepared.path / MANIFEST).read_text())["skipped"]
    assert entry == prepared.manifest.skipped
    assert entry["documents"] == len(LINES)
    reasons = [reason for _, reason in LINES.values()]
    assert entry["reasons"] == {reason: reasons.count(reason) for reason in reasons}
    named = [f"{paths / 'a.jsonl'}:{number}: {reason}" for number, (_, reason) in LINES.items()]
    assert entry["first"] == named[:5]
    said = capsys.readouterr().err
    assert f"{len(LINES)} documents are bad and were skipped" in said
    assert named[0] in said
    assert f"skipped     {len(LINES)} documents" in inspect(skipping)
    # What is left is the corpus without them.
    clean = corpus(tmp_path / "clean", bad=False)
    same = prepare(config(tmp_path / "data2", clean), processes=1, progress=False)
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (prepared.path / name).read_bytes() == (same.path / name).read_bytes()
    assert same.manifest is not None
    assert same.manifest.skipped == {}


def test_any_number_of_processes_and_ranges_skips_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = corpus(tmp_path / "corpus")
    results = []
    for processes, step in ((1, files.RANGE_BYTES), (1, 1500), (3, files.RANGE_BYTES)):
        monkeypatch.setattr(files.split_into_ranges, "__defaults__", (step,))
        skipping = config(tmp_path / f"data{processes}-{step}", paths, bad="skip", max_bad_fraction=0.5)
        prepared = prepare(skipping, processes=processes, progress=False)
        assert prepared.manifest is not None
        results.append(
            ((prepared.path / "train.bin").read_bytes(), prepared.manifest.skipped, prepared.manifest.counts)
        )
    assert results[0] == results[1] == results[2]


def test_more_than_the_limit_ends_the_preparation(tmp_path: Path) -> None:
    paths = corpus(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=r"data\.source\.bad: 10 documents are bad") as caught:
        prepare(config(tmp_path / "data", paths, bad="skip"), processes=1, progress=False)
    assert "4.76% of them, more than max_bad_fraction=0.01" in str(caught.value)
    assert f"{paths / 'a.jsonl'}:4: not JSON" in str(caught.value)
    # The limit is no property of the data: the finished shards are used.
    prepare(config(tmp_path / "data", paths, bad="skip", max_bad_fraction=0.2), processes=1, progress=False)


def test_data_prepared_without_the_choice_is_found(tmp_path: Path) -> None:
    """The folder of `refuse` is the one that data had before there was a choice, and `skip` has another."""
    plain = Jsonl(Jsonl.Config(paths=("x",)))
    assert plain.identity().keys() == {"kind", "paths", "field", "longest"}
    skip = config(tmp_path, tmp_path, bad="skip")
    assert prepared_folder(skip) != prepared_folder(config(tmp_path, tmp_path))


@pytest.mark.parametrize("document", ["line", "file"])
def test_text_is_skipped_too(document: Any, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text(words(number, 20))
    (folder / "10.txt").write_bytes(b"good line\n\xff\xfe not UTF-8\n" + b"x" * (3 << 20) + b"\ngood again\n")
    source = Text.Config(paths=(str(folder),), document=document, longest=1000, bad="skip", max_bad_fraction=0.2)
    data = DataConfig(source=source, tokenizer=Byte.Config(), folder=str(tmp_path / "data"), sequence_length=16)
    prepared = prepare(data, processes=1, progress=False)
    assert prepared.manifest is not None
    skipped = prepared.manifest.skipped
    if document == "line":
        assert skipped["reasons"] == {"longer than `longest`": 1, "not UTF-8": 1}
        assert skipped["first"] == [f"{folder}/10.txt:2: not UTF-8", f"{folder}/10.txt:3: longer than `longest`"]
    else:
        assert skipped["documents"] == 1
        assert skipped["first"] == [f"{folder}/10.txt:1: longer than `longest`"]
