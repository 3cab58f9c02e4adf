"""The state of a corpus's files: by their times of modification, and where those differ by samples of the content."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xscale.data.source.columns import STREAMED
from xscale.data.source.source import ByteRange

SAMPLES, SAMPLE = 32, 1 << 16
"""Samples of a file and their bytes: 2 MiB; a smaller file is read in full."""


@dataclass(frozen=True)
class CorpusState:
    """Hashes of the files of a corpus, or of a part of it; empty: it has no files, or they are not known."""

    stamp: str = ""
    """Hash of sizes and times of modification, which a look at the folders gives."""
    content: str = ""
    """Hash of samples of the content, which are read where times differ, as after a copy."""

    def is_of(self, ranges: Iterable[ByteRange]) -> bool:
        """Whether files of these names, whose sizes are the same, have the content of this state."""
        files = _files(ranges)
        return (
            self == CorpusState()
            or stamp_of(files) == self.stamp
            or content_of(files) == self.content
        )


def state_of(ranges: Iterable[ByteRange]) -> CorpusState:
    """Return the state of the files that have the ranges; empty for a corpus that is streamed."""
    files = _files(ranges)
    return CorpusState(stamp_of(files), content_of(files)) if files else CorpusState()


def _files(ranges: Iterable[ByteRange]) -> list[str]:
    return [
        file
        for file in dict.fromkeys(part.file for part in ranges)
        if not file.startswith(STREAMED)
    ]


def stamp_of(files: Iterable[str]) -> str:
    """Hash the sizes and times of modification of files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            status = os.stat(file)
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(b"missing\n")
    return digest.hexdigest()


def content_of(files: Iterable[str]) -> str:
    """Hash samples of the content of files: all of a small one, else evenly spaced ones, the first and the last too.

    A file that cannot be read has a hash of its own: reading the corpus says why.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            for sample in _samples(file):
                digest.update(sample)
        except OSError:
            digest.update(b"\0missing\0")
    return digest.hexdigest()


def _samples(file: str) -> Iterator[bytes]:
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        yield f"{size}\n".encode()
        if size <= SAMPLES * SAMPLE:
            yield stream.read()
            return
        for number in range(SAMPLES):
            stream.seek((size - SAMPLE) * number // (SAMPLES - 1))
            yield stream.read(SAMPLE)
