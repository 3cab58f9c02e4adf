"""Sentences: how a text is split, what is written of them, and the two halves and the other text of a sample."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import PreparedData, prepared_folder
from xscale.data.corpus.split_sentences import split_sentences
from xscale.data.indexed import IndexedDataset, IndexedWriter
from xscale.data.samples.loader import open_corpus
from xscale.data.samples.sentences import first_of_one_sentence, truncate

TEXTS = [
    "".join(f"Text {number} says {word} {'so ' * (word % 4)}often. " for word in range(2 + number % 7))
    for number in range(40)
]
LENGTH = 90


def config(folder: Path, texts: list[str] = TEXTS, **fields: Any) -> DataConfig:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    base: dict[str, Any] = {
        "source": {"kind": "text", "paths": (str(folder / "*.txt"),)},
        "tokenizer": {"kind": "byte"},
        "folder": str(folder / "data"),
        "validation": 0.2,
        "sequence_length": LENGTH,
        "split_sentences": True,
    }
    return DataConfig.model_validate(base | fields)


def prepared_from(settings: DataConfig) -> PreparedData:
    return prepare(settings, processes=1, progress=False)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine", ["Hello there. ", "How are you? ", "Fine"]),
        ('He said "No!" (twice.) Then, e.g. once more.', ['He said "No!" ', "(twice.) ", "Then, e.g. once more."]),
        ("def f():\n    return 1.5\n\n \nx = 2\n", ["def f():\n", "    return 1.5\n\n \n", "x = 2\n"]),
        (" \n a. \n", [" \n a. \n"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\uff01", ["\u4f60\u597d\u3002", "\u518d\u89c1\uff01"]),
        ("", [""]),
    ],
)
def test_a_text_is_split_where_sentences_end(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences
    assert "".join(sentences) == text


def test_each_sentence_is_a_sequence_and_each_text_a_document(tmp_path: Path) -> None:
    prepared = prepared_from(config(tmp_path, validation=0.0))
    assert prepared.manifest is not None
    assert prepared.manifest.sentences
    indexed, tokenizer = prepared.train.indexed, prepared.tokenizer
    texts = []
    for first, stop in pairwise(indexed.bounds):
        cuts = indexed.sequence_starts[first : stop + 1]
        pieces = [indexed.tokens[at:to].tolist() for at, to in pairwise(cuts)]
        assert pieces[-1].pop() == tokenizer.eos
        sentences = [tokenizer.decode(piece) for piece in pieces]
        assert sentences == split_sentences("".join(sentences))
        texts.append("".join(sentences))
    assert texts == TEXTS
    assert not prepared_folder(config(tmp_path, split_sentences=False)).exists()


def test_a_moved_text_keeps_its_sentences(tmp_path: Path) -> None:
    """The validation split gets one text, whichever it is, and training has the others."""
    prepared = prepared_from(config(tmp_path, validation=1e-9))
    assert prepared.validation is not None
    counts = [len(np.diff(split.indexed.bounds)) for split in (prepared.train, prepared.validation)]
    assert counts == [len(TEXTS) - 1, 1]
    split = {text: len(split_sentences(text)) for text in TEXTS}
    for part in (prepared.train, prepared.validation):
        for number, text in enumerate(part.texts(prepared.tokenizer)):
            assert np.diff(part.indexed.bounds)[number] == split[text.decode()]


def test_a_sample_has_two_halves_of_a_text_and_another(tmp_path: Path) -> None:
    settings = config(tmp_path, validation=0.0)
    prepared = prepared_from(settings)
    corpus = open_corpus(settings, seed=3)
    epoch = len(corpus.train.data)
    assert epoch == chunks(prepared, LENGTH - 3)
    samples = corpus.train.samples(0, 2 * epoch)
    assert samples.tokens.shape == samples.documents.shape == (2 * epoch, 2 * (LENGTH - 3))
    openings, truncated = [], 0
    for row, documents in zip(samples.tokens, samples.documents, strict=True):
        first, second, other = (prepared.tokenizer.decode(row[documents == text].tolist()) for text in range(3))
        assert prepared.tokenizer.eos not in row.tolist()
        assert (row[documents == 3] == prepared.tokenizer.pad).all()
        assert documents.tolist() == sorted(documents.tolist())
        sizes = [len(text) for text in (first, second, other)]
        assert all(sizes)
        assert max(sizes[0] + sizes[1], sizes[0] + sizes[2]) <= LENGTH - 3
        home = [number for number, text in enumerate(TEXTS) if first + second in text]
        cut = not home
        if not cut:
            (number,) = home
            assert first in "".join(split_sentences(TEXTS[number]))
            assert other not in TEXTS[number]
            openings.append((number, TEXTS[number].index(first)))
        truncated += cut
    assert 0 < truncated < len(samples)
    # Epochs have the same chunks in another order, split in other places.
    assert (samples.tokens[:epoch] != samples.tokens[epoch:]).any()
    assert max(openings.count(opening) for opening in openings) == 2


def test_the_order_is_a_function_of_seed_and_index(tmp_path: Path) -> None:
    settings = config(tmp_path)
    prepared_from(settings)
    rows = open_corpus(settings, seed=3).train.samples(0, 40)
    later = open_corpus(settings, seed=3).train.samples(31, 5)
    assert later.tokens.tolist() == rows.tokens[31:36].tolist()
    assert later.documents.tolist() == rows.documents[31:36].tolist()
    assert open_corpus(settings, seed=4).train.samples(31, 5).tokens.tolist() != later.tokens.tolist()


def test_texts_are_truncated_as_bert_does() -> None:
    for first in range(1, 9):
        for second in range(1, 9):
            for most in range(2, 12):
                one, two = np.arange(first), 100 + np.arange(second)
                draws = np.random.default_rng([first, second, most])
                kept = truncate(one, two, most, draws)
                assert [len(text) for text in kept] == lengths(first, second, most)
                for text, full in zip(kept, (one, two), strict=True):
                    assert text.tolist() == full[full.searchsorted(text[0]) :][: len(text)].tolist()
    fronts = [truncate(np.arange(9), np.arange(1), 2, np.random.default_rng(seed))[0][0] for seed in range(400)]
    assert 3.6 < np.mean(fronts) < 4.4


def lengths(first: int, second: int, most: int) -> list[int]:
    """The loop of BERT's `truncate_seq_pair`."""
    while first + second > most:
        if first > second:
            first -= 1
        else:
            second -= 1
    return [first, second]


def chunks(prepared: PreparedData, budget: int) -> int:
    """Stretches of `budget` tokens of a document in which at least two of its sentences start."""
    indexed, count = prepared.train.indexed, 0
    for first, stop in pairwise(indexed.bounds):
        starts = indexed.sequence_starts[first:stop] - indexed.sequence_starts[first]
        stretches = [int(start) // budget for start in starts]
        count += sum(stretches.count(number) > 1 for number in set(stretches))
    return count


def test_a_pair_of_another_program_is_read(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", np.uint16, None)
    for number in range(5):
        writer.add(*([200 + number] * 3 for _ in range(number + 1)))
    writer.finish()
    assert np.diff(IndexedDataset(tmp_path / "pair").bounds).tolist() == [1, 2, 3, 4, 5]
    settings = config(tmp_path, prepared=str(tmp_path / "pair"), validation=0.0, sequence_length=21)
    assert open_corpus(settings, seed=0).train.samples(0, 4).tokens.shape == (4, 36)


@pytest.mark.parametrize(
    ("texts", "fields", "message"),
    [
        (["One."] * 3, {}, "no document of the train split has two sentences.*/00.txt:1. .*a smaller data.validation"),
        (["One. Two. Three."], {}, "has one document, and a sample takes text of another"),
        (TEXTS, {"sequence_length": 4}, "a pair of texts and its 3 special tokens need 5"),
    ],
)
def test_data_without_pairs_of_sentences_is_refused(
    tmp_path: Path, texts: list[str], fields: dict[str, Any], message: str
) -> None:
    settings = config(tmp_path, texts, validation=0.0, **fields)
    prepared_from(settings)
    with pytest.raises(ConfigError, match=message):
        open_corpus(settings, seed=0)


def test_text_that_was_not_split_is_refused(tmp_path: Path) -> None:
    packed = prepared_from(config(tmp_path, split_sentences=False, validation=0.0))
    settings = config(tmp_path, prepared=str(packed.path), validation=0.0)
    with pytest.raises(ConfigError, match=r"has two sentences close enough.*") as raised:
        open_corpus(settings, seed=0)
    assert "data.split_sentences" in str(raised.value)


def test_documents_without_a_pair_are_counted(tmp_path: Path) -> None:
    """The line of the first text of one sentence is that of its split, and none where the source is gone."""
    settings = config(tmp_path, [*TEXTS, "One.", "Two."], validation=0.0)
    prepared_from(settings)
    (dataset,) = open_corpus(settings, seed=0).sentence_datasets
    assert (dataset.left_out, dataset.documents) == (2, len(TEXTS) + 2)
    lines = tmp_path / "lines.txt"
    lines.write_text("One. Two.\n\nThree.\nFour.\n")
    source = {"source": {"kind": "text", "paths": (str(lines),), "document": "line"}, "split_sentences": True}
    by_line = DataConfig.model_validate(source | {"validation": 0.0})
    assert first_of_one_sentence(by_line, "train") == f"{lines}:3"
    assert first_of_one_sentence(by_line, "validation") is None
    lines.unlink()
    assert first_of_one_sentence(by_line, "train") is None
