"""What a file must be: its size, and a hash of its content that costs a fraction of the time of writing it.

The hash finds damage, it does not keep out forgers. It is multilinear (Carter and Wegman 1979), which a processor does
at the speed of its memory: of each block of 1 MiB, as 8-byte words x, the sums of a x and of b (x >> 32) modulo 2^64,
with fixed odd random words a, b for each place; SHA-256 seals the sums of all blocks and the size. Damage within one
word of a block is always found. Any other is missed with a chance of 2^-32 at most (that is where the highest bits of
words or of their halves alone are flipped), and of 2^-63 where the last bit of a word is among what changed.
"""

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy
import numpy.typing
from typing_extensions import Buffer

from xscale.core.errors import ConfigError

BLOCK = 1 << 20
WORD = 8
Words = numpy.typing.NDArray[numpy.uint64]


@dataclass(frozen=True)
class Digest:
    """What a file must be: its size in bytes and the hash of its content, in hex."""

    size: int
    value: str
    hash: str
    """Its name in HASHES."""


class Hash(Protocol):
    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


@cache
def weights() -> Words:
    """What the words of a block and their halves are multiplied by: for ever the same, or no manifest could be checked.

    Odd, of shape [2, words of a block].
    """
    drawn = numpy.frombuffer(hashlib.shake_256(b"xscale multilinear").digest(2 * BLOCK), "<u8")
    return (drawn | numpy.uint64(1)).reshape(2, -1)


class Multilinear:
    """The hash of what has been given so far, in pieces of any length."""

    def __init__(self) -> None:
        self._weights = weights()
        self._half = numpy.empty(BLOCK // WORD, numpy.uint64)
        self._seal = hashlib.sha256()
        self._rest = b""
        """Bytes that are no whole word yet."""
        self._place = self._low = self._high = self._size = 0
        """Of the block that is not whole yet: its words and their sums. Of the file: its bytes."""

    def update(self, data: Buffer, /) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._rest:
            missing = WORD - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < WORD:
                return
            self._take(numpy.frombuffer(self._rest, "<u8"))
        whole = len(view) // WORD * WORD
        self._rest = bytes(view[whole:])
        if whole:
            self._take(numpy.frombuffer(view[:whole], "<u8"))

    def _take(self, words: Words) -> None:
        while len(words):
            part = words[: BLOCK // WORD - self._place]
            place = slice(self._place, self._place + len(part))
            half = numpy.right_shift(part, numpy.uint64(32), out=self._half[: len(part)])
            self._low += int(numpy.dot(part, self._weights[0, place]))
            self._high += int(numpy.dot(half, self._weights[1, place]))
            self._place += len(part)
            words = words[len(part) :]
            if self._place == BLOCK // WORD:
                self._seal.update(self._sums())
                self._place = self._low = self._high = 0

    def _sums(self) -> bytes:
        return b"".join((one % (1 << 64)).to_bytes(WORD, "little") for one in (self._low, self._high))

    def hexdigest(self) -> str:
        """Of all that was given; after it, nothing more may be."""
        if self._rest:
            self._take(numpy.frombuffer(self._rest.ljust(WORD, b"\0"), "<u8"))
            self._rest = b""
        self._seal.update(self._sums() + self._size.to_bytes(WORD, "little"))
        return self._seal.hexdigest()


HASHES: dict[str, type[Multilinear] | Any] = {"multilinear": Multilinear, "sha256": hashlib.sha256}
"""By the name that a manifest gives."""
HASH = "multilinear"
"""What is written."""


def begin(name: str) -> Hash:
    found: Hash = HASHES[name]()
    return found


def digest_of(path: Path, name: str = HASH) -> Digest:
    """Read a file and say what it is."""
    hashing, size = begin(name), 0
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hashing.update(memoryview(block)[:count])
            size += count
    return Digest(size, hashing.hexdigest(), name)


def encode(digest: Digest) -> dict[str, Any]:
    """As a manifest has it."""
    return asdict(digest)


def decode(path: Path, data: dict[str, Any]) -> Digest:
    """Out of the manifest at `path`, of this format or the first, which had SHA-256 alone."""
    if "sha256" in data:
        return Digest(data["size"], data["sha256"], "sha256")
    if data["hash"] not in HASHES:
        what, known = f"its files are hashed by '{data['hash']}'", ", ".join(HASHES)
        raise ConfigError(str(path), what, f"This xscale knows {known}; read it with the version that wrote it.")
    return Digest(**data)
