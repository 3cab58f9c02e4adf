"""Samples of pairs: truncated or padded, in an order of the seed and the index alone, from files as of other data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.corpora import words
from xscale.core.errors import ConfigError
from xscale.data.config import BlendItem, DataConfig
from xscale.data.corpus import shards
from xscale.data.corpus.inspect import inspect
from xscale.data.corpus.manifest import MANIFEST
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import prepared_folder
from xscale.data.indexed import IndexedDataset
from xscale.data.samples.loader import open_corpus
from xscale.data.samples.pairs import PairDataset
from xscale.data.source import files
from xscale.data.source.pairs import PairSource
from xscale.data.tokenizer.byte import Byte

ROWS = [(words(seed, seed % 5 + 1).strip(), words(seed + 100, seed % 3 + 1).strip()) for seed in range(60)]


def config(folder: Path, rows: list[tuple[str, str]] = ROWS, **fields: Any) -> DataConfig:
    folder.mkdir(exist_ok=True)
    file = folder / "pairs.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps({"source": one, "target": two}) + "\n" for one, two in rows))
    base: dict[str, Any] = {
        "source": PairSource.Config(paths=(str(file),)),
        "tokenizer": Byte.Config(),
        "folder": str(folder / "data"),
        "validation": 0.2,
        "sequence_length": 20,
        "max_target_length": 8,
    }
    return DataConfig(**(base | fields))


def test_a_sample_is_a_pair_truncated_or_padded(tmp_path: Path) -> None:
    settings = config(tmp_path, order="text", validation=0.0)
    prepared = prepare(settings, processes=1, progress=False)
    tokenizer = prepared.tokenizer
    samples = open_corpus(settings, seed=0).train.samples(0, len(ROWS))
    assert samples.tokens.shape == samples.documents.shape == (len(ROWS), 28)
    for (source, target), row, documents in zip(ROWS, samples.tokens.tolist(), samples.documents.tolist(), strict=True):
        read, written = [*tokenizer.encode(source), tokenizer.eos], [*tokenizer.encode(target), tokenizer.eos]
        read = read if len(read) <= 20 else [*read[:19], tokenizer.eos]
        written = written[:8]
        assert row[:20] == read + [tokenizer.pad] * (20 - len(read))
        assert row[20:] == written + [tokenizer.pad] * (8 - len(written))
        assert documents == [0] * len(read) + [1] * (20 - len(read)) + [0] * len(written) + [1] * (8 - len(written))
    dataset = PairDataset(prepared.train, settings, tokenizer.pad)
    longer = [sum(len(pair[side]) + 1 > most for pair in ROWS) for side, most in ((0, 20), (1, 8))]
    assert dataset.truncated() == (longer[0], longer[1])
    assert f"\n{ROWS[0][0]}\n=> {ROWS[0][1]}" in inspect(settings, documents=1)
    assert 0 < longer[0] < len(ROWS)


def test_the_order_is_a_function_of_seed_and_index(tmp_path: Path) -> None:
    settings = config(tmp_path)
    prepare(settings, processes=1, progress=False)
    corpus = open_corpus(settings, seed=3)
    epoch = len(corpus.train.data)
    samples = corpus.train.samples(0, 2 * epoch)
    rows = [tuple(row) for row in samples.tokens.tolist()]
    assert sorted(rows[:epoch]) == sorted(rows[epoch:])
    assert rows[:epoch] != rows[epoch:]
    assert [tuple(row) for row in open_corpus(settings, seed=3).train.samples(7, 9).tokens.tolist()] == rows[7:16]
    assert [tuple(row) for row in open_corpus(settings, seed=4).train.samples(7, 9).tokens.tolist()] != rows[7:16]


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.split_into_ranges, "__defaults__", (400,))
    monkeypatch.setattr(shards, "MIN_SHARD_BYTES", 400)
    written = []
    for processes in (1, 2):
        settings = config(tmp_path).model_copy(update={"folder": str(tmp_path / f"data{processes}")})
        assert len(shards.plan_shards(settings)) > 3
        manifest = prepare(settings, processes=processes, progress=False).manifest
        assert manifest is not None
        assert manifest.pairs
        written.append(manifest)
    assert written[0] == written[1]
    assert written[0].counts["train"].documents + written[0].counts["validation"].documents == len(ROWS)
    indexed = IndexedDataset(prepared_folder(settings) / "train")
    assert len(indexed.sequence_starts) - 1 == 2 * len(indexed)


def test_a_source_is_in_one_split_whatever_its_targets(tmp_path: Path) -> None:
    settings = config(tmp_path, [(one, f"{two} {number}") for one, two in ROWS for number in range(3)])
    prepared = prepare(settings, processes=1, progress=False)
    assert prepared.validation is not None
    sides = []
    for split in (prepared.train, prepared.validation):
        bounds = split.indexed.sequence_starts
        sides.append({bytes(split.indexed.tokens[at:to]) for at, to in zip(bounds[:-1:2], bounds[1::2], strict=False)})
    assert not sides[0] & sides[1]


def test_an_empty_validation_split_gets_a_pair(tmp_path: Path) -> None:
    settings = config(tmp_path, validation=1e-9)
    prepared = prepare(settings, processes=1, progress=False)
    assert prepared.validation is not None
    assert prepared.validation.documents == 1
    assert prepared.train.documents == len(ROWS) - 1
    (target,) = prepared.validation.target_texts(prepared.tokenizer)
    assert target.decode() in [two for _, two in ROWS]
    assert len(open_corpus(settings, seed=0).train.samples(0, 59)) == 59


def test_prepared_pairs_are_opened_and_blended_with_pairs_alone(tmp_path: Path) -> None:
    settings = config(tmp_path / "a")
    first = prepare(settings, processes=1, progress=False)
    second = prepare(config(tmp_path / "b", ROWS[::-1][:30]), processes=1, progress=False)
    again = settings.model_copy(update={"prepared": str(first.path)})
    assert open_corpus(again, seed=1).pairs
    items = tuple(BlendItem(prepared=str(one.path)) for one in (first, second))
    corpus = open_corpus(settings.model_copy(update={"blend": items}), seed=1)
    assert len(corpus.pair_datasets) == 2
    assert corpus.train.samples(0, 4).tokens.shape == (4, 28)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(words(1, 400))
    stream = DataConfig.model_validate(
        {"source": {"kind": "text", "paths": (str(text),), "document": "line"}, "tokenizer": {"kind": "byte"}}
    ).model_copy(update={"folder": str(tmp_path / "t")})
    other = prepare(stream, processes=1, progress=False)
    mixed = (items[0], BlendItem(prepared=str(other.path)))
    with pytest.raises(ConfigError, match=r"are pairs of a source and a target, those of .* are not"):
        open_corpus(settings.model_copy(update={"blend": mixed}), seed=1)


def test_a_manifest_that_lies_of_pairs_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(words(1, 400))
    settings = DataConfig.model_validate(
        {"source": {"kind": "text", "paths": (str(text),), "document": "line"}, "tokenizer": {"kind": "byte"}}
    ).model_copy(update={"folder": str(tmp_path / "t")})
    file = prepare(settings, processes=1, progress=False).path / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"pairs": True}))
    with pytest.raises(ConfigError, match="its documents are not a source and a target each"):
        open_corpus(settings, seed=0)
    file.write_text(json.dumps(manifest | {"pairs": 1}))
    with pytest.raises(ConfigError, match="pairs is 1"):
        open_corpus(settings, seed=0)


def test_a_split_without_pairs_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path)
    split = prepare(settings, processes=1, progress=False).train
    empty = type(split)("validation", split.indexed, 0, 0)
    with pytest.raises(ConfigError, match="the validation split has no pairs"):
        PairDataset(empty, settings, 0)
    assert np.array_equal(split.pair_lengths.sum(1), np.diff(split.starts))


def test_a_prefix_names_the_task_of_each_source(tmp_path: Path) -> None:
    plain = config(tmp_path, order="text", validation=0.0)
    prefixed = plain.model_copy(update={"source": plain.source.model_copy(update={"prefix": "add: "})})
    assert prepared_folder(plain) != prepared_folder(prefixed)
    prepare(prefixed, processes=1, progress=False)
    samples = open_corpus(prefixed, seed=0).train.samples(0, len(ROWS))
    tokenizer = Byte(Byte.Config(), tmp_path)
    for (source, _), row in zip(ROWS, samples.tokens.tolist(), strict=True):
        assert row[:19] == [*tokenizer.encode(f"add: {source}"), tokenizer.eos, *[tokenizer.pad] * 19][:19]
    longest = plain.model_copy(update={"source": plain.source.model_copy(update={"prefix": "a" * 19})})
    prepare(longest, processes=1, progress=False)
    with pytest.raises(ConfigError, match=r"data\.source\.prefix: the prefix 'a+' has 19 tokens, and a source has 20"):
        open_corpus(longest, seed=0)
    folder = str(prepared_folder(longest))
    short = str(prepare(plain, processes=1, progress=False).path)
    chosen = {
        "data.prepared": {"prepared": folder},
        "data.blend.1.prepared": {"blend": (BlendItem(prepared=short), BlendItem(prepared=folder))},
    }
    for path, update in chosen.items():
        settings = plain.model_copy(update=update)
        with pytest.raises(ConfigError, match=r"has 19 tokens, and a source has 20") as raised:
            open_corpus(settings, seed=0)
        assert [problem.path for problem in raised.value.problems] == [path]
        assert "data.max_source_length of at least 21" in str(raised.value)
        assert open_corpus(settings.model_copy(update={"max_source_length": 21}), seed=0).pairs
