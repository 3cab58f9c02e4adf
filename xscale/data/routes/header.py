"""The header of a file of routes: its model, layers, experts and tokenizer, and where its chunks are.

A file has 32 bytes (`PREFIX`), then chunks, then the header as JSON, so that chunks are written as they arise.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import decode_json

MAGIC = b"XSROUTES"
VERSION = 1
PREFIX = struct.Struct("<8sIIQQ")
"""Magic, version, CRC-32 of the header, and its offset and length in bytes; an offset of 0: it was never finished."""
RECORD_AGAIN = "Record the routes again, or give another file."


@dataclass(frozen=True)
class RouteLayout:
    """The routes of a token: which layers have them, and how many experts a layer has."""

    layers: tuple[str, ...]
    """L paths of mixtures, such as stack.blocks.1.ffn, in the order of the array's axis."""
    experts: tuple[int, ...]
    """Experts of each layer."""
    top_k: tuple[int, ...]
    """Experts of a token in each layer; the array has as many as the largest."""
    model: str | None = None
    """Fingerprint of the model's parameter names and shapes; None: routes of another engine."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer; None: not known."""

    @property
    def width(self) -> int:
        """K, the experts of a token in the array."""
        return max(self.top_k)


@dataclass(frozen=True)
class RouteChunk:
    """A part of the file: some sequences, their ids and their routes, each compressed by itself."""

    offset: int
    text_bytes: int
    route_bytes: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class RouteHeader:
    """Layout, dtypes and chunks of a file of routes."""

    layout: RouteLayout
    ids: str
    """dtype of the token ids."""
    routes: str
    """dtype of the routes: the expert plus 1, or 0 for no expert."""
    weights: str | None
    """dtype of the weights; None: the file has none."""
    chunks: tuple[RouteChunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def sequences(self) -> int:
        """Sequences of all chunks."""
        return sum(chunk.sequences for chunk in self.chunks)

    def encode(self) -> bytes:
        """Return the header as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def pack_prefix(header: bytes, offset: int) -> bytes:
    """Return the first bytes of a file whose encoded header stands at `offset`."""
    return PREFIX.pack(MAGIC, VERSION, zlib.crc32(header), offset, len(header))


def read_header(content: Any, where: str, key: str) -> RouteHeader:
    """Read the header of a file by its bytes; ConfigError at `key` for a file that is cut short, or is no such file."""
    size = len(content)
    if size < PREFIX.size or bytes(content[: len(MAGIC)]) != MAGIC:
        fix = "Give a file that --record-routes or write_routes wrote."
        raise ConfigError(key, f"{where} is no file of routes", fix)
    _, version, checksum, offset, length = PREFIX.unpack(bytes(content[: PREFIX.size]))
    if version != VERSION:
        what = f"{where} has version {version} of the format, and this xscale reads {VERSION}"
        raise ConfigError(key, what, RECORD_AGAIN)
    if offset == 0 or offset + length > size:
        end = "it was never finished" if offset == 0 else f"{offset + length} bytes are expected"
        raise ConfigError(
            key, f"{where} is cut short: it has {size} bytes, and {end}", RECORD_AGAIN
        )
    header = bytes(content[offset : offset + length])
    damaged = ConfigError(key, f"the header of {where} is damaged", RECORD_AGAIN)
    if zlib.crc32(header) != checksum:
        raise damaged
    try:
        return _decode(decode_json(header), offset)
    except (KeyError, TypeError, ValueError):
        raise damaged from None


def _decode(data: dict[str, Any], end: int) -> RouteHeader:
    layout = RouteLayout(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in data["layout"].items()
        }
    )
    counts = {len(layout.layers), len(layout.experts), len(layout.top_k)}
    if len(counts) != 1 or not layout.layers or min(*layout.top_k, *layout.experts) < 1:
        raise ValueError("layers, experts and top_k differ in number, or one is empty")
    names = [attribute.name for attribute in fields(RouteChunk)]
    chunks = tuple(
        RouteChunk(**{name: int(chunk[name]) for name in names}) for chunk in data["chunks"]
    )
    for chunk in chunks:
        if not PREFIX.size <= chunk.offset <= end - chunk.text_bytes - chunk.route_bytes:
            raise ValueError("a chunk does not lie before the header")
    return RouteHeader(layout, str(data["ids"]), str(data["routes"]), data["weights"], chunks)
