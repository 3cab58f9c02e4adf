"""Hugging Face's `tokenizers`: byte-level BPE (Radford et al. 2019) trained here, or any existing tokenizer.json."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pydantic

from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import reporting_full_disk, write_atomically
from xscale.core.files.file_safety import decode_json
from xscale.core.foreign import foreign_errors, quiet_panics
from xscale.core.paths import PathText
from xscale.data.tokenizer.decoder import DecoderError, piece_decoder
from xscale.data.tokenizer.file_bounds import check_bounds
from xscale.data.tokenizer.template import Template, read_template, template_of_file
from xscale.data.tokenizer.tokenizer import (
    DEFAULT_VOCABULARY,
    SPECIAL_TOKENS,
    TOKENIZERS,
    UNUSED,
    FileTokenizer,
    Tokenizer,
    TokenizerTraits,
    sentinel_ids,
    special_tokens,
)

FILE = "tokenizer.json"
PROBE = "A first text, of 3 lines:\n\tcafé 漢字 \U0001f600  </s> <0x41>\n" + 60 * "a"
"""Text on which a tokenizer is tried when it is opened."""
CANNOT = "the library cannot use this tokenizer.json on a text"
FEWEST = 300
"""Ids of a tokenizer that is trained, at the least."""
FIM = ("<fim_{}>", "<|fim_{}|>", "<fim-{}>")
"""Names of the special tokens for filling in the middle, as models of code have them."""


@TOKENIZERS.register("huggingface", traits=TokenizerTraits(trained=True, lossless=True))
class HuggingFace(FileTokenizer):
    """An existing file encodes as the library does, with the tokens that its template puts before a text. One that
    normalises texts (lower case, spaces) is not lossless, and bits per byte are those of the normalised text."""

    FILE = FILE
    COMPANIONS = (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    )

    class Config(Tokenizer.Config):
        vocabulary: int | None = pydantic.Field(
            default=None, ge=1, le=1 << 24, examples=[DEFAULT_VOCABULARY]
        )
        """Number of ids, including special tokens and the 256 bytes; null: 8192, or those of an existing file. With a
        file, a larger number pads: the further ids are rows of the model that no text has, as in many models."""
        sample_bytes: PositiveInt = 16 << 20
        """Bytes of text to train on, from documents sampled by their hash."""
        file: PathText | None = None
        """An existing tokenizer.json to use instead of training one."""
        eos: str | None = None
        """End-of-document token of an existing file; null: `</s>`."""
        pad: str | None = None
        """Padding token of an existing file; null: `<pad>` if it has one, else `eos`."""
        mask: str | None = None
        """Mask token of an existing file; null: `<mask>` if it has one."""

        bos: str | None = None
        """Beginning-of-text token of an existing file, named in exports; null: `<s>` if it has one, else the one token
        that its template puts before a text, if any."""

        @pydantic.model_validator(mode="before")
        @classmethod
        def _vocabulary_of_training(cls, data: Any) -> Any:
            """A tokenizer that is trained here has a number, which runs and prepared data are compared by."""
            if isinstance(data, dict) and not data.get("file") and data.get("vocabulary") is None:
                return {**data, "vocabulary": DEFAULT_VOCABULARY}
            return data

        @pydantic.model_validator(mode="after")
        def _enough_to_train(self) -> "HuggingFace.Config":
            if not self.file and (self.vocabulary or 0) < FEWEST:
                raise ValueError(
                    f"a tokenizer that is trained has at least {FEWEST} ids (`vocabulary`)"
                )
            return self

    @classmethod
    def example(cls) -> Tokenizer.Config:
        return cls.Config(vocabulary=400, sentinels=10)

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder)
        self.processor, text = _open(self.file, self.read_file())
        self.vocabulary = max(self.processor.get_vocab().values(), default=-1) + 1
        self.unpadded_vocabulary = self.vocabulary
        if config.file and config.vocabulary is not None:
            self.vocabulary = max(self.vocabulary, config.vocabulary)
        data = decode_json(text)
        template = self._template(data)
        names = dict(zip(("pad", "bos", "eos", "unk", "mask"), SPECIAL_TOKENS, strict=True))
        eos = self._named("eos", config.eos, names["eos"])
        if eos is None:
            special = [
                token.content
                for token in self.processor.get_added_tokens_decoder().values()
                if token.special
            ]
            fix = f"Set data.tokenizer.eos; its special tokens: {', '.join(special[:9]) or 'none'}."
            raise ConfigError(
                str(self.file), "it has no token </s>, and no end-of-document token is given", fix
            )
        self.eos = eos
        pad = self._named("pad", config.pad, names["pad"])
        self.pad = eos if pad is None else pad
        unk = self._unknown(data.get("model"), names["unk"])
        self.unk = eos if unk is None else unk
        self.bos = self._named("bos", config.bos, names["bos"])
        if self.bos is None and len(template.prefix) == 1:
            self.bos = template.prefix[0]
        self.mask = self._named("mask", config.mask, names["mask"])
        self.sentinels = sentinel_ids(self.processor.token_to_id)
        self.fim = self._fim_tokens()
        with foreign_errors(self.file, "its decoder is none that is known"):
            self.table = self._table(data.get("decoder"))
        self.set_template(
            hashlib.blake2b(f"{eos} {text}".encode(), digest_size=16).hexdigest(), template.prefix
        )

    @classmethod
    def identity(cls, config: Config) -> dict[str, Any]:
        # Padding changes no document; data of before there was a null has the number that was the default.
        return super().identity(config) | {"vocabulary": config.vocabulary or DEFAULT_VOCABULARY}

    @classmethod
    def adds_bos(cls, config: Config) -> bool:
        if config.add_bos is None and config.file:
            return bool(template_of_file(Path(config.file)).prefix)
        return bool(config.add_bos)

    def _template(self, data: Any) -> Template:
        try:
            return read_template(data.get("post_processor"))
        except (ValueError, KeyError, TypeError) as error:
            fix = "Mend its section post_processor, or set it to null."
            raise ConfigError(
                str(self.file), f"the template of a text cannot be read: {error}", fix
            ) from None

    def _named(self, key: str, configured: str | None, usual: str) -> int | None:
        token: int | None = self.processor.token_to_id(configured or usual)
        if token is None and configured is not None:
            raise ConfigError(
                f"data.tokenizer.{key}",
                f"{self.file} has no token '{configured}'",
                "Give one that it has.",
            )
        return token

    def _unknown(self, model: Any, usual: str) -> int | None:
        """Return the id of what the file's model writes for a text that it does not know; None: there is none."""
        section = model if isinstance(model, dict) else {}
        if isinstance(token := section.get("unk_id"), int):
            return token
        name = section.get("unk_token")
        return self._named("unk", None, name if isinstance(name, str) and name else usual)

    def _fim_tokens(self) -> tuple[int, int, int] | None:
        """Return the ids of the special tokens before prefix, suffix and middle; None: the file has none."""
        added = self.processor.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}
        for pattern in FIM:
            ids = [
                special.get(pattern.format(section)) for section in ("prefix", "suffix", "middle")
            ]
            match ids:
                case [int(prefix), int(suffix), int(middle)]:
                    return prefix, suffix, middle
        return None

    def _table(self, decoder: Any) -> list[bytes]:
        try:
            read = piece_decoder(decoder)
        except DecoderError as error:
            fix = "Give one that decodes bytes, subwords or words."
            raise ConfigError(
                str(self.file), f"the text of its tokens is unknown: {error}", fix
            ) from None
        table = [b""] * self.vocabulary
        for piece, token in self.processor.get_vocab(with_added_tokens=False).items():
            table[token] = read(piece)
        for token, added in self.processor.get_added_tokens_decoder().items():
            table[token] = b"" if added.special else added.content.encode("utf-8")
        return table

    def encode(self, text: str) -> list[int]:
        with foreign_errors(self.file, CANNOT):
            ids: list[int] = self.processor.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with foreign_errors(self.file, CANNOT):
            encoding = self.processor.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_with_special_tokens(self, text: str) -> list[int]:
        self.processor.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.processor.encode_special_tokens = True

    def decode(self, tokens: Iterable[int]) -> str:
        with foreign_errors(self.file, CANNOT):
            text: str = self.processor.decode(
                [int(token) for token in tokens], skip_special_tokens=True
            )
        return text

    def token_bytes(self) -> list[bytes]:
        return self.table

    def piece(self, token: int) -> str:
        return self.processor.id_to_token(token) or UNUSED

    @classmethod
    def train(cls, config: Any, texts: Iterable[str], folder: Path) -> None:
        if config.file:
            return
        tokenizers = _library()
        names = special_tokens(config.sentinels)
        path, fewest = "data.tokenizer.vocabulary", len(names) + 256
        if config.vocabulary < fewest:
            what = f"{config.vocabulary} ids are too few"
            raise ConfigError(path, what, f"Special tokens and bytes alone are {fewest}.")
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=config.vocabulary,
            special_tokens=names,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if (size := tokenizer.get_vocab_size()) < config.vocabulary:
            what = f"the text is too short for {config.vocabulary} pieces"
            raise ConfigError(path, what, f"At most {size} would work.")
        with reporting_full_disk(folder / FILE):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE, tokenizer.to_str(pretty=True))


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        what = "Hugging Face's tokenizers library is not installed"
        raise ConfigError("data.tokenizer", what, "pip install 'transformers>=5.0'") from None
    return tokenizers


def _open(file: Path, content: bytes) -> tuple[Any, str]:
    """Make the tokenizer of a file's content, and return it with the text of the file."""
    tokenizers = _library()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            str(file), "this is not a tokenizer.json", "Give one, or leave it out."
        ) from None
    what = f"this is not a tokenizer.json that tokenizers {tokenizers.__version__} reads"
    fix = "Give one that it reads; training one needs none."
    with foreign_errors(file, what, fix), quiet_panics():
        check_bounds(decode_json(text))
        processor = tokenizers.Tokenizer.from_str(text)
        _encode_probe(processor)
    # A file may ask for truncation, padding, and for text that spells a special token to become that token.
    processor.no_truncation()
    processor.no_padding()
    processor.encode_special_tokens = True
    return processor, text


def _encode_probe(processor: Any) -> None:
    """Encode a text, which finds a regular expression that cannot be matched."""
    try:
        processor.encode(PROBE, add_special_tokens=False)
    except Exception as error:
        # A Unigram model without an unknown token is none the worse for texts of its own letters.
        if "`unk_id` is missing" not in str(error):
            raise
