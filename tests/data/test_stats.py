"""`xscale data stats`: small corpora whose counts are in this file; blends, padding, JSON and damaged data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xscale.cli.main import main
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus import stats
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import Split
from xscale.data.indexed import IndexedDataset, IndexedWriter
from xscale.data.samples.blend import BlendedDataset
from xscale.data.samples.labelled import LabelledDataset
from xscale.data.samples.loader import open_corpus
from xscale.data.samples.packed import PackedDataset
from xscale.data.source.text import Text
from xscale.data.tokenizer.byte import Byte

FIRST_BYTE = 5 + 100
"""Id of byte 0 of the byte tokenizer, behind its special tokens and sentinels."""
A, B = FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")
TEXTS = ("ab", "aaa", "ab", "", "abbbbbb")
"""With their ends they are 3, 4, 3, 1 and 8 tokens; the third is a copy of the first."""
EOS = 2


def write_pair(prefix: Path, texts: tuple[str, ...] = TEXTS) -> Path:
    """Write each text as a document of bytes."""
    writer = IndexedWriter(prefix, np.uint16)
    for text in texts:
        writer.add([*(FIRST_BYTE + byte for byte in text.encode()), EOS])
    writer.finish()
    return prefix


def recipe_file(folder: Path, text: str, **train: int) -> Path:
    file = folder / "recipe.yaml"
    steps = {"steps": 3, "batch_size": 4, "micro_batch_size": 4} | train
    file.write_text(
        f"use: [model/switch_tiny, objective/causal, optim/adamw_cosine]\ntrain: {json.dumps(steps)}\n{text}"
    )
    return file


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `xscale data stats` in this process; returns its status, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["xscale", "data", "stats", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return call


def from_json(run: Run, *arguments: object) -> dict[str, Any]:
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    data: dict[str, Any] = json.loads(out)
    return data


@pytest.mark.parametrize("block", [1, 3, 4, 1 << 20])
def test_a_split_is_counted_alike_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(stats, "BLOCK", block)
    indexed = IndexedDataset(write_pair(tmp_path / "pair"))
    read: list[int] = []
    train = stats.count_tokens(Split("train", indexed, 0, 3), 384, read.append)
    assert sum(read) == 20, "ten tokens of two bytes"
    assert {token: count for token, count in enumerate(train.counts.tolist()) if count} == {EOS: 3, A: 5, B: 2}
    assert train.hashes[0] == train.hashes[2] != train.hashes[1]
    last = stats.count_tokens(Split("validation", indexed, 3, 5), 384, read.append)
    assert {token: count for token, count in enumerate(last.counts.tolist()) if count} == {EOS: 2, A: 1, B: 6}
    assert len(set(last.hashes.tolist()) | set(train.hashes.tolist())) == 4


def test_empty_documents_and_splits(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", np.uint16)
    for tokens in ([], [9], [], []):
        writer.add(tokens)
    writer.finish()
    indexed = IndexedDataset(tmp_path / "pair")
    counted = stats.count_tokens(stats.whole_pair(indexed), None, lambda size: None)
    assert len(counted.counts) == 10
    assert len(counted.hashes) == 4
    assert len(set(counted.hashes.tolist())) == 2
    nothing = Split("validation", indexed, 4, 4)
    facts = stats.split_statistics(nothing, stats.count_tokens(nothing, None, lambda size: None), tokenizer=None)
    assert (facts.documents, facts.tokens, facts.duplicates, facts.duplicate_share) == (0, 0, 0, None)
    assert facts.tokens_per_document is None
    assert (facts.histogram, facts.most_frequent) == ([], [])


def test_a_pair_without_manifest(tmp_path: Path, run: Run) -> None:
    [dataset] = from_json(run, write_pair(tmp_path / "some.pair"))["datasets"]
    assert dataset["tokenizer"] is dataset["draw"] is None
    [split] = dataset["splits"]
    # Lengths 1, 3, 3, 4, 8: of five documents, four (80 %) have at most 4 tokens.
    assert split == {
        "name": "all",
        "documents": 5,
        "tokens": 19,
        "bytes": None,
        "bytes_per_token": None,
        "tokens_per_document": {"mean": 3.8, "median": 3.0, "p90": 8, "p99": 8, "max": 8},
        "histogram": [[1, 1, 1], [2, 3, 2], [4, 7, 1], [8, 15, 1]],
        "longer": None,
        "padding": None,
        "vocabulary": None,
        "distinct_tokens": 3,
        "most_frequent": [
            {"id": B, "text": None, "count": 8, "share": 8 / 19},
            {"id": A, "text": None, "count": 6, "share": 6 / 19},
            {"id": EOS, "text": None, "count": 5, "share": 5 / 19},
        ],
        "duplicates": 1,
        "duplicate_share": 0.2,
        "repeated_from_train": None,
        "unknown": None,
    }


def test_prepared_data_of_a_recipe(tmp_path: Path, run: Run) -> None:
    """The tokenizer is that of the config; the last two of five documents are the validation split."""
    pair = write_pair(tmp_path / "pair", (*TEXTS[:4], "ab"))
    text = f"data: {{prepared: {pair}, tokenizer: byte, sequence_length: 3, validation: 0.4}}"
    file = recipe_file(tmp_path, text)
    statistics = from_json(run, file)
    assert (statistics["sequence_length"], statistics["steps"], statistics["batch_size"]) == (3, 3, 4)
    [dataset] = statistics["datasets"]
    # Ten tokens are three samples of three tokens and the one after them; twelve samples are drawn.
    assert dataset["draw"] == {"weight": 1.0, "samples": 12, "token_share": 1.0, "epochs": 4.0}
    train, validation = dataset["splits"]
    assert (train["bytes"], train["bytes_per_token"], train["longer"], train["padding"]) == (7, 0.7, 1 / 3, None)
    assert [token["text"] for token in train["most_frequent"]] == ["a", "</s>", "b"]
    assert (train["vocabulary"], train["unknown"], train["repeated_from_train"]) == (384, 0.0, None)
    assert (validation["documents"], validation["duplicates"], validation["repeated_from_train"]) == (2, 0, 1)
    status, out, err = run(file, "data.sequence_length=2")
    assert status == 0, err
    for line in (
        "run: 3 steps of 4 sequences, 12 samples",
        "  12 samples drawn, 3 epochs",
        "train: 3 documents, 10 tokens, 7 bytes, 0.70 bytes per token",
        "  tokens per document: mean 3.3, median 3.0, p90 4, p99 4, max 4",
        "  longer than 2 tokens: 100 % of the documents",
        "  distinct tokens: 3 of 384 in the vocabulary",
        "  exact duplicates: 1, 33.3 % of the documents",
        "  also in the train split: 1",
        "      50 %      202  'a'",
    ):
        assert line in out.splitlines()
    assert ["2", "-", "3", "2", "#" * 40] in [line.split() for line in out.splitlines()]


def test_a_recipe_is_prepared_and_its_folder_has_the_same_counts(tmp_path: Path, run: Run) -> None:
    for number, text in enumerate(("ee", "ée", "ee")):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    source = f"source: {{kind: text, paths: ['{tmp_path}/*.txt']}}"
    text = (
        f"data: {{{source}, tokenizer: byte, folder: {tmp_path}/data, validation: 0, sequence_length: 4, workers: 1}}"
    )
    [dataset] = from_json(run, recipe_file(tmp_path, text))["datasets"]
    [train] = dataset["splits"]
    # 'é' is two bytes, neither of which is a character.
    assert (train["documents"], train["tokens"], train["bytes"], train["duplicates"]) == (3, 10, 7, 1)
    assert [token["text"] for token in train["most_frequent"]] == ["e", "</s>", "<0xA9>", "<0xC3>"]
    [again] = from_json(run, dataset["path"])["datasets"]
    assert again == dataset | {"draw": None, "splits": [train | {"longer": None}]}


def test_a_blend_has_a_line_for_each_member(tmp_path: Path, run: Run) -> None:
    first, second = write_pair(tmp_path / "first"), write_pair(tmp_path / "second", ("a" * 40,))
    items = f"[{{prepared: {first}, weight: 3}}, {{prepared: {second}}}]"
    text = f"data: {{blend: {items}, tokenizer: byte, sequence_length: 3, validation: 0}}"
    file = recipe_file(tmp_path, text)
    draws = [dataset["draw"] for dataset in from_json(run, file)["datasets"]]
    # 19 tokens are 6 samples, 41 are 13.
    assert draws == [
        {"weight": 3.0, "samples": 9, "token_share": 0.75, "epochs": 9 / 6},
        {"weight": 1.0, "samples": 3, "token_share": 0.25, "epochs": 3 / 13},
    ]
    assert "  9 samples drawn, weight 3, 75 % of the run's tokens, 1.5 epochs" in run(file)[1]


def test_what_a_blend_draws_is_what_it_locates(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "pair"))
    packed = PackedDataset(Split("train", indexed, 0, 5), 3)
    blend = BlendedDataset([packed] * 3, [0.2, 0.5, 0.37])
    for samples in (0, 1, 7, 100):
        located = [blend.locate(index)[0] for index in range(samples)]
        assert blend.drawn(samples) == [located.count(number) for number in range(3)]


def test_padding_of_pairs(tmp_path: Path, run: Run) -> None:
    pairs = [{"source": "ab", "target": "a"}, {"source": "abcdef", "target": "abc"}]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    data = f"{{source: {{kind: pairs, paths: {tmp_path}/pairs.jsonl}}, tokenizer: byte, folder: {tmp_path}/data}}"
    overrides = ("data.max_source_length=5", "data.max_target_length=5", "data.validation=0", "data.workers=1")
    [dataset] = from_json(run, "vanilla-transformer", f"data={data}", *overrides)["datasets"]
    [train] = dataset["splits"]
    # The sources have 3 and 7 tokens, of which 3 and 5 are kept, the targets 2 and 4; a pair has 10 places.
    assert train["padding"] == pytest.approx(6 / 20)
    assert (train["longer"], train["tokens"]) == (0.5, 16)


def test_padding_of_labelled_examples(tmp_path: Path) -> None:
    rows = [{"text": "ab", "label": "yes"}, {"text": "abcdef", "label": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"kind": "labelled", "paths": [f"{tmp_path}/rows.jsonl"], "classes": ["no", "yes"]}
    fields = {"source": source, "tokenizer": "byte", "folder": str(tmp_path), "validation": 0, "sequence_length": 5}
    config = decode(DataConfig, fields)
    prepare(config, processes=1, progress=False)
    examples = open_corpus(config, seed=0).train.data
    assert isinstance(examples, LabelledDataset)
    # A sample begins with a token of its own: 1 + 3 of 5 are text, and then all.
    assert examples.padding_share() == pytest.approx(1 / 10)
    assert examples.truncated() == 1


def test_unknown_tokens(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", np.uint16)
    writer.add([3, A, 3, EOS])
    writer.finish()
    split = stats.whole_pair(IndexedDataset(tmp_path / "pair"))
    counted, tokenizer = stats.count_tokens(split, 384, lambda size: None), Byte(Byte.Config(), tmp_path)
    assert stats.split_statistics(split, counted, tokenizer=tokenizer).unknown == 0.5
    tokenizer.unk = tokenizer.eos
    assert stats.split_statistics(split, counted, tokenizer=tokenizer).unknown is None, "it has no such token"


def test_bad_input_ends_with_a_sentence(tmp_path: Path, run: Run) -> None:
    status, _, err = run(tmp_path)
    assert (status, "there is no prepared data here: No such file" in err) == (2, True), err
    pair = write_pair(tmp_path / "pair")
    status, _, err = run(pair, "data.sequence_length=4")
    assert (status, "is prepared data, without a config" in err) == (2, True), err
    index = pair.with_name("pair.idx")
    index.write_bytes(index.read_bytes()[:-8])
    status, _, err = run(pair)
    assert (status, "the index is" in err, "Traceback" in err) == (2, True, False), err
    status, _, err = run(tmp_path / "nowhere.yaml")
    assert (status, "nowhere.yaml" in err) == (2, True), err


def test_an_id_of_no_token_is_refused(tmp_path: Path, run: Run) -> None:
    """Between the ids that are sampled when the data is opened."""
    (tmp_path / "text.txt").write_text("a" * 400_000)
    config = DataConfig(
        source=Text.Config(paths=(f"{tmp_path}/text.txt",)), tokenizer=Byte.Config(), folder=str(tmp_path), validation=0
    )
    folder = prepare(config, processes=1, progress=False).path
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r+")
    tokens[5000] = 999
    tokens.flush()
    status, _, err = run(folder)
    assert (status, "the data contains token 999, but the tokenizer's vocabulary is 384" in err) == (2, True), err
    with pytest.raises(ConfigError, match="contains token 999"):
        stats.count_tokens(stats.whole_pair(IndexedDataset(folder / "train")), 384, lambda size: None)
