"""SentencePiece (Kudo and Richardson 2018): BPE or unigram pieces with byte fallback."""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic

from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import reporting_full_disk, write_atomically
from xscale.core.files.file_safety import decode_json, read_regular
from xscale.core.paths import PathText
from xscale.data.tokenizer.tokenizer import (
    DEFAULT_VOCABULARY,
    TOKENIZERS,
    FileTokenizer,
    Tokenizer,
    TokenizerTraits,
    sentinel_ids,
    special_tokens,
)

FILE = "tokenizer.model"
SPACE = "\u2581"
"""SentencePiece writes a space as this character, so a text that contains it must not reach the library."""
COMPANION = "tokenizer_config.json"
"""File of transformers beside a model, which says how a text begins."""
NAMED = ("bos", "eos", "pad")
"""Special tokens of an existing model that the config may name."""
SENTENCE = 4000
"""Bytes of the blocks of lines that training sees: pieces may contain line ends."""


@TOKENIZERS.register("sentencepiece", traits=TokenizerTraits(trained=True, lossless=True))
class SentencePiece(FileTokenizer):
    FILE = FILE

    class Config(Tokenizer.Config):
        model: Literal["bpe", "unigram"] = "bpe"
        """Training algorithm: BPE (seconds) or a unigram language model (minutes)."""
        vocabulary: int = pydantic.Field(default=DEFAULT_VOCABULARY, ge=300, le=1 << 24)
        """Number of ids, including special tokens and the 256 bytes. An existing model has its own number."""
        coverage: float = pydantic.Field(default=0.9995, gt=0.9, le=1)
        """Character coverage: fraction of the text's characters that are pieces; rarer ones are encoded as bytes."""
        sample_bytes: PositiveInt = 16 << 20
        """Bytes of text to train on, from documents sampled by their hash."""
        digits: bool = False
        """Make each digit its own piece."""
        file: PathText | None = None
        """An existing model file to use instead of training one, of any origin: one that was not trained here has its
        own special tokens, and encodes as the library does."""
        bos: str | None = None
        """Beginning-of-text token of an existing model; null: the one that it names."""
        eos: str | None = None
        """End-of-document token of an existing model; null: the one that it names."""
        pad: str | None = None
        """Padding token of an existing model; null: the one that it names, else `eos`."""

    @classmethod
    def example(cls) -> Tokenizer.Config:
        return cls.Config(vocabulary=400, sentinels=10)

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder)
        import sentencepiece

        file, proto = self.file, self.read_file()
        fix = "Give another one." if config.file else "Train it again."
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(proto)
        except (RuntimeError, ValueError):
            raise ConfigError(str(file), "this is not a SentencePiece model", fix) from None
        self.vocabulary = self.processor.GetPieceSize()
        self.is_foreign = bool(config.file) and not self._has_our_specials()
        """Whether it was trained elsewhere: its special ids are its own, and it may change a text."""
        try:
            if self.is_foreign:
                self._read_specials(file)
            else:
                self._check_specials(file)
            self.table = [self._bytes(token) for token in range(self.vocabulary)]
        except ValueError as error:
            what = f"this is not a SentencePiece model: a piece is not text ({error})"
            raise ConfigError(str(file), what, fix) from None
        template = (
            (self.bos,)
            if config.file and _companion_adds_bos(file) and self.bos is not None
            else ()
        )
        self.set_template(hashlib.blake2b(proto, digest_size=16).hexdigest(), template)

    @classmethod
    def identity(cls, config: Config) -> dict[str, Any]:
        # Data that was prepared before other models could be used has no such keys.
        data = super().identity(config)
        return {key: value for key, value in data.items() if key not in NAMED or value is not None}

    @classmethod
    def adds_bos(cls, config: Config) -> bool:
        if config.add_bos is None and config.file:
            return _companion_adds_bos(Path(config.file))
        return bool(config.add_bos)

    def _has_our_specials(self) -> bool:
        """Whether the model's first ids are those of `special_tokens`."""
        names = special_tokens(0)
        return (
            self.vocabulary > len(names)
            and [self._name(token) for token in range(len(names))] == names
        )

    def _name(self, token: int) -> str:
        try:
            return str(self.processor.IdToPiece(token))
        except ValueError:
            # A piece that is not UTF-8; reading all pieces says so.
            return ""

    def _read_specials(self, file: Path) -> None:
        """Take the special ids of a model that was trained elsewhere; ConfigError without an end-of-document token."""
        config, processor = self.config, self.processor

        def named(key: str, token: int) -> int | None:
            name = getattr(config, key)
            if name is None:
                return token if token >= 0 else None
            if (known := self._id_of(name)) is None:
                what, fix = f"{file} has no token '{name}'", "Give one that it has."
                raise ConfigError(f"data.tokenizer.{key}", what, fix)
            return known

        eos = named("eos", processor.eos_id())
        if eos is None:
            what = "the model names no end-of-document token"
            raise ConfigError(str(file), what, "Set data.tokenizer.eos to one of its pieces.")
        self.eos = eos
        self.bos = named("bos", processor.bos_id())
        self.unk = processor.unk_id()
        pad = named("pad", processor.pad_id())
        self.pad = eos if pad is None else pad
        self.mask = self._id_of("<mask>")
        self.sentinels = sentinel_ids(self._id_of)

    def _id_of(self, piece: str) -> int | None:
        token = self.processor.PieceToId(piece)
        return token if self._name(token) == piece else None

    def _check_specials(self, file: Path) -> None:
        for token, name in enumerate(special_tokens(self.config.sentinels)):
            if token >= self.vocabulary or self.processor.IdToPiece(token) != name:
                what = f"id {token} of this model is not {name}"
                raise ConfigError(
                    str(file),
                    what,
                    "Use a model that `xscale data tokenizer` trained with as many sentinels.",
                )
        if not all(
            self.processor.PieceToId(f"<0x{value:02X}>") != self.unk for value in range(256)
        ):
            raise ConfigError(
                str(file), "this model has no byte fallback", "Train it with byte_fallback."
            )

    def _bytes(self, token: int) -> bytes:
        if self.processor.IsControl(token) or self.processor.IsUnknown(token):
            return b""
        piece: str = self.processor.IdToPiece(token)
        if self.processor.IsByte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode("utf-8")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if not self.is_foreign:
            return super().encode_with_offsets(text)
        if hasattr(self.processor, "EncodeAsOffsetMapping"):
            mapping = self.processor.EncodeAsOffsetMapping(text)
            return mapping["ids"], mapping["offsets"]
        # Versions of the library before that method.
        processor: Any = self.processor
        pieces = processor.EncodeAsImmutableProto(text).pieces
        return [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]

    def encode(self, text: str) -> list[int]:
        if SPACE not in text or self.is_foreign:
            return self.processor.EncodeAsIds(text)  # type: ignore[no-any-return]
        space = [self.processor.PieceToId(f"<0x{value:02X}>") for value in SPACE.encode("utf-8")]
        first, *following = text.split(SPACE)
        tokens = self.processor.EncodeAsIds(first)
        for part in following:
            tokens += space + self.processor.EncodeAsIds(part)
        return tokens  # type: ignore[no-any-return]

    def token_bytes(self) -> list[bytes]:
        return self.table

    def piece(self, token: int) -> str:
        return str(self.processor.IdToPiece(token))

    @classmethod
    def train(cls, config: Config, texts: Iterable[str], folder: Path) -> None:
        import sentencepiece

        if config.file:
            return
        names = special_tokens(config.sentinels)
        written = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=_sentences(texts),
                model_writer=written,
                model_type=config.model,
                vocab_size=config.vocabulary,
                character_coverage=config.coverage,
                split_digits=config.digits,
                byte_fallback=True,
                # Lossless: no normalisation, no spaces added or removed.
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                pad_id=0,
                bos_id=1,
                eos_id=2,
                unk_id=3,
                pad_piece=names[0],
                bos_piece=names[1],
                eos_piece=names[2],
                unk_piece=names[3],
                control_symbols=names[4:],
                max_sentence_length=1 << 20,
                # The number of threads changes the sums of the unigram model, so it is fixed.
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _refusal(config, str(error)) from None
        with reporting_full_disk(folder / FILE):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE, written.getvalue())


def _companion_adds_bos(file: Path) -> bool:
    """Whether a tokenizer_config.json beside a model says that a text begins with the beginning-of-text token."""
    try:
        settings = decode_json(read_regular(file.with_name(COMPANION)))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("add_bos_token") is True


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield blocks of at most about SENTENCE characters, split at line ends."""
    for text in texts:
        gathered: list[str] = []
        size = 0
        for line in text.replace(SPACE, " ").splitlines(keepends=True):
            if size + len(line) > SENTENCE and gathered:
                yield "".join(gathered)
                gathered, size = [], 0
            for start in range(0, len(line), SENTENCE):
                gathered.append(line[start : start + SENTENCE])
                size += len(gathered[-1])
                if size >= SENTENCE:
                    yield "".join(gathered)
                    gathered, size = [], 0
        if gathered:
            yield "".join(gathered)


def _refusal(config: Any, message: str) -> ConfigError:
    if "sentences_.empty()" in message:
        fix = "Name files that contain text, or raise data.tokenizer.sample_bytes."
        return ConfigError("data.source", "the sample for the tokenizer contains no text", fix)
    at_most = re.search(r"value <= (\d+)", message)
    at_least = re.search(r"(?:smaller than required_chars|required_chars)\D*\d+ vs (\d+)", message)
    path = "data.tokenizer.vocabulary"
    if at_most:
        limit = int(at_most.group(1))
        return ConfigError(
            path,
            f"the text is too short for {config.vocabulary} pieces",
            f"At most {limit} would work.",
        )
    if at_least:
        need = int(at_least.group(1))
        return ConfigError(
            path,
            f"{config.vocabulary} ids are too few",
            f"The characters alone need more than {need}.",
        )
    # The library names the line of its source and the condition in it, which help nobody.
    reason = (
        re.sub(r"^.*?src/\S+\s*|\[[^\]]*\]\s*", "", message.strip())[-300:]
        or "the library does not say why"
    )
    fix = (
        "Try another data.tokenizer.vocabulary, or data.tokenizer.kind=byte, which is not trained."
    )
    return ConfigError(
        "data.tokenizer", f"SentencePiece cannot be trained on this text: {reason}", fix
    )
