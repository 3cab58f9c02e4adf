"""Datasets that the library `datasets` opens: shards in order, pinned by a commit, refused offline with what works."""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import missing_files, prepare
from xscale.data.samples.loader import open_corpus
from xscale.data.source.source import SOURCES, Source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [[f"Text {row} of file {number}." for row in range(4)] for number in range(3)]


@pytest.fixture(autouse=True)
def _cache_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def written(folder: Path, texts: list[list[Any]] = TEXTS, column: str = "text") -> Path:
    (folder / "data").mkdir(parents=True)
    for number, values in enumerate(texts):
        lines = [json.dumps({"id": row, column: text}) for row, text in enumerate(values)]
        (folder / "data" / f"train-{number:05d}.jsonl").write_text("\n".join(lines))
    return folder


def source(dataset: Path | str, **keys: Any) -> Source:
    config = decode(DataConfig, {"source": {"kind": "hub", "dataset": str(dataset), **keys}}).source
    made: Source = SOURCES.build(config)
    return made


def test_every_row_of_every_shard_is_read_once_in_order(tmp_path: Path) -> None:
    made = source(written(tmp_path / "corpus"))
    ranges = made.byte_ranges()
    assert len(ranges) == 3
    documents = list(made.documents())
    assert [document.text for document in documents] == [text for texts in TEXTS for text in texts]
    assert len({document.name for document in documents}) == 12
    assert [document.text for document in made.read(ranges[1])] == TEXTS[1]


def test_the_first_shards_alone(tmp_path: Path) -> None:
    made = source(written(tmp_path / "corpus"), max_shards=2)
    assert [document.text for document in made.documents()] == TEXTS[0] + TEXTS[1]


def test_bad_rows_are_refused_by_row_or_skipped(tmp_path: Path) -> None:
    folder = written(tmp_path / "corpus", [["good", None, " ", "fine"]])
    with pytest.raises(ConfigError, match=r"#0:2: the column 'text' must hold strings, got null"):
        list(source(folder).documents())
    made = source(folder, bad="skip")
    assert [document.text for document in made.documents()] == ["good", "fine"]
    assert made.skipped.reasons == {"the column 'text' holds no string": 1}


def test_it_is_prepared_once_and_then_needs_no_source(tmp_path: Path) -> None:
    folder = written(tmp_path / "corpus", [["good " * 9, None, f"fine {number}"] for number in range(3)])
    data = {
        "source": {"kind": "hub", "dataset": str(folder), "bad": "skip", "max_bad_fraction": 0.5},
        "tokenizer": {"kind": "byte"},
        "folder": str(tmp_path / "prepared"),
        "sequence_length": 8,
        "validation": 0.0,
        "workers": 1,
    }
    config = decode(DataConfig, data)
    assert missing_files(config) == []
    manifest = prepare(config, progress=False).manifest
    assert manifest is not None
    assert manifest.counts["train"].documents == 6
    assert manifest.skipped["first"][0].endswith("#0:2: the column 'text' holds no string")
    (folder / "data" / "train-00001.jsonl").unlink()
    prepare(config, progress=False)
    assert open_corpus(config, seed=0).train is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"field": "content"}, r"there is no column 'content'; the file has: id, text"),
        ({"split": "test"}, r"cannot be read: Bad split: test\. Available splits: \['train'\]"),
        ({"subset": "other"}, r"cannot be read: BuilderConfig 'other' not found"),
    ],
)
def test_what_the_dataset_lacks_is_named(keys: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        source(written(tmp_path / "corpus"), **keys).byte_ranges()


def test_a_folder_without_data_is_refused_offline_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"doesn.t contain any data files.*Give a folder of data files"):
        source(tmp_path / "empty").byte_ranges()


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "corpus")
    total = sum(file.stat().st_size for file in (folder / "data").iterdir())
    assert [part.size for part in source(folder).byte_ranges()] == [total // 3] * 3


def test_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"data\.source\.dataset: is empty"):
        source("").byte_ranges()


def test_offline_the_name_is_refused_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    (problem,) = missing_files(decode(DataConfig, {"source": {"kind": "hub", "dataset": "lab/corpus"}}))
    assert problem.path == "data.source.dataset"
    assert problem.what == "'lab/corpus' cannot be read: Cannot reach the hub: offline mode is enabled"
    assert "hf download lab/corpus --repo-type dataset" in problem.advice
    assert "kind: parquet" in problem.advice


def test_a_dataset_of_the_hub_is_read_at_the_commit_that_was_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "corpus")
    asked: list[tuple[str, str | None, str | None]] = []
    load = datasets.load_dataset

    class Info:
        sha = COMMIT

    def look_up(_: Any, name: str, revision: str | None = None) -> Info:
        asked.append((name, None, revision))
        return Info()

    def load_local(name: str, subset: str | None, *, revision: str, **options: Any) -> Any:
        asked.append((name, subset, revision))
        return load(str(folder), None, **options)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", look_up)
    monkeypatch.setattr(datasets, "load_dataset", load_local)
    made = source("lab/corpus", subset="small", revision="v2")
    first = made.byte_ranges()[0]
    assert first.file == f"hub:lab/corpus/small/train@{COMMIT}#0"
    assert [document.text for document in made.read(first)] == TEXTS[0]
    assert asked == [("lab/corpus", None, "v2"), ("lab/corpus", "small", COMMIT), ("lab/corpus", "small", COMMIT)]


def test_a_stream_that_breaks_is_a_mistake_with_a_way_on(tmp_path: Path) -> None:
    folder = written(tmp_path / "corpus")
    made = source(folder)
    ranges = made.byte_ranges()
    (folder / "data" / "train-00002.jsonl").write_text('{"id": 1, "text": "a"}\n{"id": 2, "te')
    with pytest.raises(ConfigError, match=r"data\.source\.dataset: .* cannot be read"):
        list(made.read(ranges[2]))
