"""Files of word vectors: what is read, the nearest words by literal cosines, and entries that are at fault."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from xscale.core.errors import ConfigError
from xscale_tinybert.word_vectors import WordVectors, read_word_vectors

ENTRIES: dict[str, list[float]] = {
    "dog": [1, 0, 2],
    "cat": [1, 0.5, 2],
    "red": [-1, 3, 0],
    "blue": [-1.5, 2, 0.25],
    "it's": [0, 1, 1],
}
LINES = "".join(f"{word} {' '.join(map(str, values))}\n" for word, values in ENTRIES.items())


def read(folder: Path, text: str) -> WordVectors:
    (folder / "vectors.txt").write_text(text, encoding="utf-8")
    return read_word_vectors(folder / "vectors.txt")


def test_the_nearest_words_have_the_greatest_cosine(tmp_path: Path) -> None:
    vectors = read(tmp_path, LINES)
    for word, values in ENTRIES.items():
        cosines = {
            other: np.dot(values, theirs_values) / np.linalg.norm(values) / np.linalg.norm(theirs_values)
            for other, theirs_values in ENTRIES.items()
            if other != word
        }
        for count in (1, 2, 4, 99):
            nearest = sorted(cosines, key=lambda other: -cosines[other])[:count]
            assert sorted(vectors.nearest(word, count)) == sorted(nearest)
    assert vectors.nearest("Dog", 1) == ["cat"]
    assert vectors.nearest("dogs", 1) == []
    assert vectors.nearest("dog", 4) == ["cat", "red", "blue", "it's"]
    assert read(tmp_path, "alone 1 2\n").nearest("alone", 3) == []


@pytest.mark.parametrize("text", [f"5 3\n{LINES}", f"\n{LINES}", LINES.rstrip("\n"), LINES.replace("\n", " \n")])
def test_other_forms_of_the_file(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).words == list(ENTRIES)


def test_what_is_no_word_and_the_second_entry_of_a_word_are_left_out(tmp_path: Path) -> None:
    vectors = read(tmp_path, f"{LINES}, 1 2 3\n. . . 1 2 3\nat x@y.z 4 5 6\ndog 9 9 9\n")
    assert vectors.words == list(ENTRIES)
    np.testing.assert_allclose(vectors.unit[0], np.array([1, 0, 2]) / 5**0.5, rtol=1e-6)


def test_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    assert read_word_vectors(tmp_path / "vectors.txt.gz").words == list(ENTRIES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{LINES}pig 1 2\n", "vectors.txt:6: the line has 2 numbers, and those before it 3"),
        (f"{LINES}pig 1 x 2\n", "vectors.txt:6: the last 3 entries of the line are not all numbers"),
        (f"5 3\n{LINES}pig 1 nan 2\n", "vectors.txt:7: a number of the vector is not finite"),
        ("pig\n", "vectors.txt:1: the line has no number"),
        ("", "vectors.txt: the file has no vector of a word"),
        (", 1 2\n", "vectors.txt: the file has no vector of a word"),
    ],
)
def test_an_entry_at_fault_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt").write_bytes(LINES.encode() + b"\xff 1 2 3\n")
    with pytest.raises(ConfigError, match=r"vectors.txt:6: the word is not UTF-8 text"):
        read_word_vectors(tmp_path / "vectors.txt")
    with pytest.raises(ConfigError, match=r"absent.txt: there is no such file"):
        read_word_vectors(tmp_path / "absent.txt")
