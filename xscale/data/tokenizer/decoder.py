"""The decoder of a tokenizer.json: the bytes of text that each piece of the vocabulary stands for."""

from collections.abc import Callable, Iterator
from typing import Any

Step = tuple[str, str, str]
"""Kind, replaced text, replacement."""


class DecoderError(Exception):
    """A decoder whose pieces have no text of their own."""


def piece_decoder(decoder: Any) -> Callable[[str], bytes]:
    """Return a function from a piece to its UTF-8 bytes.

    `decoder` is the file's section of that name, None for plain words. DecoderError when it is not supported.
    """
    steps = tuple(_steps(decoder))
    kinds = {kind for kind, _, _ in steps}
    if "ByteLevel" in kinds:
        table = byte_letters()
        return lambda piece: b"".join(
            table.get(letter) or letter.encode("utf-8") for letter in piece
        )
    if not steps:
        return lambda piece: f" {piece}".encode()
    return lambda piece: _bytes(piece, steps, "ByteFallback" in kinds)


def _bytes(piece: str, steps: tuple[Step, ...], fallback: bool) -> bytes:
    if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    for kind, old, new in steps:
        if kind == "WordPiece":
            piece = piece.removeprefix(old) if piece.startswith(old) else f" {piece}"
        elif kind == "BPEDecoder":
            piece = f"{piece.removesuffix(old)} " if piece.endswith(old) else piece
        elif kind in ("Replace", "Metaspace"):
            piece = piece.replace(old, new)
    return piece.encode("utf-8")


def _steps(decoder: Any) -> Iterator[Step]:
    """Yield the steps of a decoder, without effect for those that only join pieces or trim a text."""
    if decoder is None:
        return
    kind = decoder["type"]
    if kind == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    elif kind == "Replace" and "String" in decoder["pattern"]:
        yield kind, decoder["pattern"]["String"], decoder["content"]
    elif kind == "Metaspace":
        yield kind, decoder["replacement"], " "
    elif kind == "WordPiece":
        yield kind, decoder["prefix"], ""
    elif kind == "BPEDecoder":
        yield kind, decoder["suffix"], ""
    elif kind in ("ByteLevel", "ByteFallback", "Fuse", "Strip"):
        yield kind, "", ""
    else:
        raise DecoderError(f"its decoder is of kind {kind}")


def byte_letters() -> dict[str, bytes]:
    """GPT-2's character for each byte: itself if printable, else the next character after the first 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [value for value in range(256) if value not in printable]
    return {chr(value): bytes([value]) for value in printable} | {
        chr(256 + number): bytes([value]) for number, value in enumerate(unprintable)
    }
