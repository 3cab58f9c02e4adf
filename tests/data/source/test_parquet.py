"""Parquet and saved Hugging Face datasets: every row once, in order, by row groups; bad ones refused by row."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.bounds import begin_peak, peak_above
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.source import columns
from xscale.data.source.source import SOURCES, Source

TEXTS = [f"Text {number}, é." for number in range(3000)]


def written(folder: Path, data: dict[str, list[Any]], name: str = "a.parquet", rows: int = 1000) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(data)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    else:
        make: Callable[..., Any] = pyarrow.ipc.new_file if name.startswith("file") else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, rows)
    return path


def source(kind: str, path: Path, **keys: Any) -> Source:
    config = decode(DataConfig, {"source": {"kind": kind, "paths": [str(path)], **keys}}).source
    made: Source = SOURCES.build(config)
    return made


def test_every_row_is_read_once_by_row_groups(tmp_path: Path) -> None:
    path = written(tmp_path, {"other": list(range(3000)), "text": TEXTS})
    made = source("parquet", tmp_path)
    ranges = made.byte_ranges()
    assert len(ranges) == 3
    assert [part.start for part in ranges[1:]] == [part.stop for part in ranges[:-1]]
    assert (ranges[0].start, ranges[-1].stop) == (0, path.stat().st_size)
    documents = list(made.documents())
    assert [document.text for document in documents] == TEXTS
    assert [document.name for document in documents] == [f"{path}:{row}" for row in range(3000)]
    last = list(made.read(ranges[2]))
    assert [document.text for document in last] == TEXTS[2000:]


@pytest.mark.parametrize("name", ["stream/data-00000-of-00001.arrow", "file.arrow"])
def test_a_dataset_saved_to_disk_is_its_arrow_files(tmp_path: Path, name: str) -> None:
    written(tmp_path, {"text": TEXTS}, name)
    (tmp_path / "state.json").write_text("{}")
    assert [document.text for document in source("parquet", tmp_path).documents()] == TEXTS


def test_pairs_and_labels_come_from_columns(tmp_path: Path) -> None:
    pairs = written(tmp_path, {"source": ["a", "b"], "target": ["x", "y"]}, "pairs.parquet")
    read = [(one.text, one.target) for one in source("pairs", pairs, prefix="do: ").documents()]
    assert read == [("do: a", "x"), ("do: b", "y")]
    words = written(tmp_path, {"text": [["New", "York"]], "label": [["B", "I"]], "id": [7]}, "tags.parquet")
    (tags,) = source("labelled", words, labels="tags", classes=["B", "I"]).documents()
    assert (tags.text, tags.label) == ("New York", (0, 1))
    both = written(tmp_path, {"text": ["a"], "more": ["b"], "label": [0.5]}, "scores.parquet")
    (score,) = source("labelled", both, labels="score", pair_field="more").documents()
    assert (score.text, score.second, score.label) == ("a", "b", 0.5)


def test_bad_rows_are_refused_by_row_or_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": ["good", None, "a\0b", " ", "fine"]}, rows=2)
    with pytest.raises(ConfigError, match=r"a\.parquet:2: the column 'text' must hold strings, got null"):
        list(source("parquet", path).documents())
    made = source("parquet", path, bad="skip")
    assert [document.text for document in made.documents()] == ["good", "fine"]
    assert made.skipped.first == [
        (str(path), 1, "the column 'text' holds no string"),
        (str(path), 2, "the column 'text' is not text"),
    ]
    table = written(tmp_path, {"source": ["a", "b"], "target": ["x", ""]}, "pairs.parquet")
    with pytest.raises(ConfigError, match=r"pairs\.parquet:2: the field 'target' is empty"):
        list(source("pairs", table).documents())


def test_a_missing_column_a_bad_file_and_a_missing_library_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {"txt": ["a"]})
    with pytest.raises(ConfigError, match=r"no column 'text'; the file has: txt.*'txt'.*data\.source\.field"):
        list(source("parquet", path).documents())
    (tmp_path / "b.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(ConfigError, match=r"b\.parquet: the file cannot be read as Parquet"):
        source("parquet", tmp_path / "b.parquet").byte_ranges()
    (tmp_path / "c.arrow").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"c\.arrow: the file cannot be read as Arrow"):
        list(source("parquet", tmp_path / "c.arrow").documents())
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"another ending.*\.parquet or \.arrow"):
        source("parquet", tmp_path / "d.txt").byte_ranges()
    monkeypatch.setattr(columns, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pyarrow is not installed.*pip install 'pyarrow>=18'"):
        source("parquet", path).byte_ranges()


def repeated(path: Path) -> None:
    """A text of 16 MB, in 64 rows by its number in the dictionary; the reader is not told that it is one."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, pyarrow.int32()), ["a" * (16 << 20)])
    table = pyarrow.table({"text": texts})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)


def one_page(path: Path) -> None:
    """A text of 80 MiB in a page that is compressed to a few kilobytes."""
    table = pyarrow.table({"text": ["a" * (80 << 20)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)


def long_lists(path: Path) -> None:
    """A list of as many equal numbers as take 80 MiB."""
    numbers = pyarrow.array([0], pyarrow.int64()).take(pyarrow.nulls(10 << 20, pyarrow.int32()).fill_null(0))
    lists = pyarrow.ListArray.from_arrays([0, len(numbers)], numbers)
    pyarrow.parquet.write_table(pyarrow.table({"text": lists}), path, compression="zstd")


@pytest.mark.parametrize(
    ("write", "name", "largest", "refused"),
    [
        (repeated, "a.parquet", 400, ""),
        (repeated, "a.arrow", 400, ""),
        (one_page, "a.parquet", 50, r"a\.parquet: the column 'text' stands for 84 MB by \d+ bytes .*1,000 times"),
        (long_lists, "a.parquet", 50, r"a\.parquet: the column 'text' stands for 84 MB by \d+ bytes .*1,000 times"),
    ],
    ids=["one text of many rows", "the same in an Arrow file", "a page of a long text", "a list of equal numbers"],
)
def test_a_small_file_that_stands_for_gigabytes_takes_little_memory(
    write: Callable[[Path], None], name: str, largest: int, refused: str, tmp_path: Path
) -> None:
    """At most `largest` mebibytes; read all at once it would be a gigabyte."""
    write(tmp_path / name)
    made = source("parquet", tmp_path / name, longest=1 << 20, bad="refuse" if refused else "skip", max_bad_fraction=1)
    gc.collect()
    before = begin_peak()
    if refused:
        with pytest.raises(ConfigError, match=refused):
            list(made.documents())
    else:
        assert list(made.documents()) == []
        assert made.skipped.count == 64
    assert peak_above(before) < largest << 20


def test_rows_that_fit_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are at once, the documents are the same."""
    path = written(tmp_path, {"text": TEXTS})
    for most in (1, 100_000, 1 << 30):
        monkeypatch.setattr(columns, "BATCH_BYTES", most)
        assert [document.text for document in source("parquet", path).documents()] == TEXTS


def test_prepared_data_is_that_of_the_same_texts_as_json_lines(tmp_path: Path) -> None:
    import json

    written(tmp_path / "columns", {"text": TEXTS[:200]}, rows=50)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:200]))
    tokens = []
    for kind, folder in (("parquet", "columns"), ("jsonl", "lines")):
        config = {
            "source": {"kind": kind, "paths": [str(tmp_path / folder)]},
            "tokenizer": {"kind": "byte"},
            "folder": str(tmp_path / "data"),
        }
        tokens.append(prepare(decode(DataConfig, config)).train.tokens.tolist())
    assert tokens[0] == tokens[1]
