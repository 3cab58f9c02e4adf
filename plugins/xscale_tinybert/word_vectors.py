"""Word vectors in text files, as GloVe (Pennington et al. 2014), word2vec and fastText have them, and nearest words."""

from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.source import files
from xscale_tinybert.words import WORD


class WordVectors:
    """Unit vectors of words, of which the nearest have the greatest cosine."""

    def __init__(self, words: list[str], vectors: NDArray[np.float32]) -> None:
        """`vectors` [words, dims]; a vector of zeros is near to none."""
        self.words = words
        self.rows = {word: row for row, word in enumerate(words)}
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        self.unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)  # [words, dims]
        self._nearest: dict[tuple[str, int], list[str]] = {}

    def nearest(self, word: str, count: int) -> list[str]:
        """Return the `count` words with the greatest cosine to `word` except itself, in the order of the file.

        A word that has no vector is looked up in lower case; the list is empty where that has none either.
        """
        known = word if word in self.rows else word.lower()
        row = self.rows.get(known)
        if row is None:
            return []
        if (known, count) not in self._nearest:
            cosines = self.unit @ self.unit[row]  # [words]
            cosines[row] = -np.inf
            kept = min(count, len(self.words) - 1)
            rows = np.argpartition(-cosines, kept - 1)[:kept].tolist() if kept else []
            self._nearest[known, count] = [self.words[number] for number in sorted(rows)]
        return self._nearest[known, count]


def read_word_vectors(file: Path) -> WordVectors:
    """Read a file of lines `word number number ...`, plain, .gz or .zst; a first line `count dims` is skipped.

    Entries that are no words, such as punctuation, are left out; of two entries for a word the first counts.
    ConfigError names the file and line of an entry that cannot be read.
    """
    if not file.is_file():
        raise ConfigError(str(file), "there is no such file", "Give a text file of word vectors.")
    words: dict[str, None] = {}
    rows: list[NDArray[np.float32]] = []
    dims = 0
    with files.open_decompressed(str(file)) as stream:
        first = stream.readline()
        header = first.split()
        begin = 1
        if len(header) == 2 and all(cell.isdigit() for cell in header):
            dims, begin, first = int(header[1]), 2, b""
        for number, line in enumerate(chain([first] if first else [], stream), begin):
            if not line.strip():
                continue
            dims = dims or len(line.split()) - 1
            word, values = _entry(line, dims, f"{file}:{number}")
            if WORD.fullmatch(word) and word not in words:
                words[word] = None
                rows.append(values)
    if not rows:
        raise ConfigError(
            str(file),
            "the file has no vector of a word",
            "Give one of lines `word number number ...`.",
        )
    return WordVectors(list(words), np.stack(rows))


def _entry(line: bytes, dims: int, where: str) -> tuple[str, NDArray[np.float32]]:
    """Return the word and the `dims` numbers of a line."""
    fix = "Give a text file of lines `word number number ...`, such as glove.6B.300d.txt."
    # The entry may itself contain spaces.
    cells = line.rstrip().rsplit(b" ", dims) if dims else []
    try:
        word = cells[0].decode("utf-8") if cells else ""
        values = np.array(cells[1:], dtype=np.float32)
    except UnicodeDecodeError:
        raise ConfigError(
            where, "the word is not UTF-8 text", "Convert it (iconv -t utf-8)."
        ) from None
    except ValueError:
        raise ConfigError(
            where, f"the last {dims} entries of the line are not all numbers", fix
        ) from None
    if not dims or len(values) != dims:
        what = (
            f"the line has {len(values)} numbers, and those before it {dims}"
            if dims
            else "the line has no number"
        )
        raise ConfigError(where, what, fix)
    if not np.isfinite(values).all():
        raise ConfigError(where, "a number of the vector is not finite", "Take the entry out.")
    return word, values
