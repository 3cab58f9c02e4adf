"""Pairs in JSON lines, CSV and TSV: read alike, and a pair that is at fault named by its file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.source import files
from xscale.data.source.pairs import PairSource

ROWS = [("one\ntwo", 'he said "three, four"'), ("käse ▁", "cheese"), ("a,b", "c")]
QUOTED = 'source,id,target\n"one\ntwo",1,"he said ""three, four"""\nkäse ▁,2,cheese\n"a,b",3,c\n'


def source(folder: Path, **settings: Any) -> PairSource:
    return PairSource(PairSource.Config(paths=(str(folder),), **settings))


def pairs(folder: Path, **settings: Any) -> list[tuple[str, str | None]]:
    return [(one.text, one.target) for one in source(folder, **settings).documents()]


def test_the_formats_are_read_alike_plain_and_compressed(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"target": two, "source": one, "id": 3}) + "\n" for one, two in ROWS).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.csv").write_bytes(QUOTED.encode())
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(QUOTED.replace("\n", "\r\n").encode("utf-8-sig")))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "e.tsv").write_text('target\tsource\n"cheese\tkäse "▁\n', encoding="utf-8")
    (tmp_path / "README").write_text("no pairs")
    carriage = [("one\r\ntwo", ROWS[0][1]), *ROWS[1:]]
    assert pairs(tmp_path) == [*ROWS, *ROWS, *carriage, *ROWS, ('käse "▁', '"cheese')]


def test_the_fields_have_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("code,doc\nx,y\n")
    (tmp_path / "b.jsonl").write_text('{"doc": "w", "code": "v"}\n')
    assert pairs(tmp_path, source_field="code", target_field="doc") == [("x", "y"), ("v", "w")]
    with pytest.raises(ConfigError, match="are both 'a'"):
        decode(PairSource.Config, {"source_field": "a", "target_field": "a"})


def test_ranges_are_the_whole_and_a_table_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"source {number}" * (number % 5 + 1), f"target {number}") for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"source": one, "target": two}) + "\n" for one, two in rows))
    (tmp_path / "b.csv").write_text("source,target\n" + "".join(f"{one},{two}\n" for one, two in rows))
    monkeypatch.setattr(files.split_into_ranges, "__defaults__", (500,))
    corpus = source(tmp_path)
    ranges = corpus.byte_ranges()
    assert len(ranges) > 10
    assert [Path(one.file).name for one in ranges].count("b.csv") == 1
    assert ranges[-1].stop == (tmp_path / "b.csv").stat().st_size
    assert [(one.text, one.target) for one in corpus.documents()] == rows * 2
    assert sum(len(list(corpus.documents(shard, 3))) for shard in range(3)) == 400


FAULTS = {
    '{"source": "x", "target": ': r"a\.jsonl:2: the line is not JSON.*one object",
    "[1]": r'a\.jsonl:2: the line is not an object. Write \{"source": "...", "target": "..."\}',
    '{"source": "x"}': r"a\.jsonl:2: the record has no field 'target'.*Set data.source.target_field",
    '{"source": "x", "traget": "y"}': r"a\.jsonl:2: .* no field 'target'. Did you mean 'traget'\?",
    '{"target": "x"}': r"a\.jsonl:2: the record has no field 'source'",
    '{"source": "x", "target": " "}': r"a\.jsonl:2: the field 'target' is empty",
    '{"source": "", "target": "x"}': r"a\.jsonl:2: the field 'source' is empty",
    '{"source": "x", "target": null}': r"a\.jsonl:2: the field 'target' must be a string, got NoneType",
    '{"source": "x", "target": "a\\u0000"}': r"a\.jsonl:2: .* NUL or half a surrogate",
    '{"source": "x", "target": "' + "y" * 3000 + '"}': r"longer than 2000 bytes",
    '{"source": "\xff", "target": "x"}': r"a\.jsonl: this is not UTF-8 text: byte 46",
}


@pytest.mark.parametrize("line", FAULTS)
def test_a_line_at_fault_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"source": "good", "target": "g"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=FAULTS[line]):
        list(source(tmp_path, longest=2000).documents())


ROW_FAULTS = {
    "x\n": r"a\.csv:3: the row has 1 cells, and the first row names 2 columns",
    "x,y,z\n": r"a\.csv:3: the row has 3 cells",
    "x,\n": r"a\.csv:3: the field 'target' is empty",
    '"x"y,z\n': r"a\.csv:3: the row cannot be read: ',' expected after '\"'",
    '"x,y\n': r"a\.csv:3: the row cannot be read: unexpected end of data",
    f"x,{'y' * 3000}\n": r"longer than 2000 bytes",
}


@pytest.mark.parametrize("row", ROW_FAULTS)
def test_a_row_at_fault_is_named_or_skipped(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.csv").write_text("source,target\ngood,g\n" + row)
    with pytest.raises(ConfigError, match=ROW_FAULTS[row]):
        list(source(tmp_path, longest=2000).documents())
    (tmp_path / "a.csv").write_text("source,target\ngood,g\n" + row + "more,m\n")
    corpus = source(tmp_path, longest=2000, bad="skip")
    read = [one.text for one in corpus.documents()]
    # A cell whose quote is never closed contains all that follows.
    assert read == (["good"] if "unexpected" in ROW_FAULTS[row] else ["good", "more"])
    assert corpus.skipped.count == 1
    assert [files.line_at(file, offset) for file, offset, _ in corpus.skipped.first] == [3]


def test_a_table_without_the_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("source\ttragte\nx\ty\n")
    with pytest.raises(ConfigError, match=r"a\.tsv:1: there is no column 'target'; the first row names: source, trag"):
        list(source(tmp_path).documents())


def test_files_without_pairs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"the corpus is empty: .*a\.jsonl have no bytes"):
        source(tmp_path).byte_ranges()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a\.txt' has another ending.*\.jsonl, .*\.tsv, plain, \.gz or \.zst"):
        source(tmp_path / "a.txt").byte_ranges()
    with pytest.raises(ConfigError, match="matches no file"):
        source(tmp_path / "none.jsonl").byte_ranges()
