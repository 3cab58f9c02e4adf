"""Base class of tokenizers."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pydantic

from xscale.core import config as schema
from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import read_regular
from xscale.core.registry import Family

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
"""The first ids of tokenizers trained here, in this order; the sentinels `<extra_0>`, `<extra_1>`, ... follow."""


DEFAULT_VOCABULARY = 8192
"""Ids of a tokenizer that is trained here, if the config does not say."""
SENTINELS = ("<extra_{}>", "<extra_id_{}>")
"""Names of sentinel tokens: ours, and T5's."""
UNUSED = "<unused>"
"""Readable form of an id that is no token."""


@dataclass(frozen=True)
class TokenizerTraits:
    """Promises of a tokenizer."""

    trained: bool
    """It has to be trained on the corpus before it can be used."""
    lossless: bool
    """`decode(encode(text)) == text` for every text: bits per byte are exact."""


class Tokenizer:
    """Built as `Tokenizer(config, folder)`; a trained one reads its files in `folder`.

    Text becomes ids here and nowhere else: `encode_document` of what a model is trained and evaluated on,
    `encode_prompt` of what it continues, `encode` of a part of a text, which has neither begin nor end.
    """

    class Config(schema.Config):
        sentinels: int = pydantic.Field(default=100, ge=0, le=10_000)
        """Number of sentinel ids `<extra_i>` for span corruption."""
        add_bos: bool | None = None
        """Whether documents and prompts begin with the beginning-of-text token; null: as the template of an existing
        file says, and not for a tokenizer that is trained here."""
        add_eos: bool = True
        """Whether documents end with the end-of-document token, by which a model learns where a text ends: it is
        what separates documents that are packed into a sample. The template of an existing file does not change it.
        Pairs, labelled examples and sentences need it."""

    vocabulary: int
    """Ids are in [0, vocabulary)."""
    unpadded_vocabulary: int
    """Ids from here on are padding, which no text has and a model gives no probability."""
    fingerprint: str
    """Hash of everything that determines the ids of a document."""
    text_fingerprint: str = ""
    """Hash of what determines the ids of the text alone, without begin and end."""
    prefix: tuple[int, ...] = ()
    """Ids before a document and a prompt: the beginning-of-text token, or what the template of a file puts there."""
    pad = 0
    bos: int | None = 1
    """Beginning-of-text id; None: there is none."""
    eos = 2
    unk = 3
    mask: int | None = 4
    """Mask id; None: there is none."""
    fim: tuple[int, int, int] | None = None
    """Ids before prefix, suffix and middle of a tokenizer made for filling in; None: there are none."""

    @property
    def has_unknown(self) -> bool:
        """Whether there is a token for text that has no other; without one `unk` is `eos`."""
        return self.unk != self.eos

    @classmethod
    def example(cls) -> Config:
        """Return a config that can be trained on a few thousand bytes of text."""
        return cls.Config()

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config
        first = len(SPECIAL_TOKENS)
        self.sentinels = range(first, first + config.sentinels)
        """Ids of `<extra_0>`, `<extra_1>`, ..."""

    def set_template(self, fingerprint: str, template: tuple[int, ...] = ()) -> None:
        """Set `prefix` and `fingerprint`, from the hash of the text's encoding and the ids that a file puts first.

        A constructor ends with it. ConfigError when a beginning-of-text token is asked for and there is none.
        """
        self.unpadded_vocabulary = getattr(self, "unpadded_vocabulary", self.vocabulary)
        add_bos = bool(template) if self.config.add_bos is None else self.config.add_bos
        if add_bos and not template:
            if self.bos is None:
                fix = "Name it (data.tokenizer.bos), or leave add_bos out."
                raise ConfigError(
                    "data.tokenizer.add_bos", "the tokenizer has no beginning-of-text token", fix
                )
            template = (self.bos,)
        self.prefix = template if add_bos else ()
        self.text_fingerprint = self.fingerprint = fingerprint
        if self.prefix or not self.config.add_eos:
            # Without a begin the hash is that of before there was a choice, so that prepared data stays.
            text = f"{fingerprint} {list(self.prefix)} {self.config.add_eos}"
            self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @classmethod
    def identity(cls, config: Any) -> dict[str, Any]:
        """Return JSON data that identifies the ids of documents, without opening the tokenizer."""
        data: dict[str, Any] = schema.encode(config)
        # Data that was prepared before there was a choice has no begin, and an end.
        if not cls.adds_bos(config):
            del data["add_bos"]
        else:
            data["add_bos"] = True
        if data["add_eos"]:
            del data["add_eos"]
        return data

    @classmethod
    def planned_vocabulary(cls, config: Any) -> int | None:
        """Return the number of ids that a tokenizer of this config will have; None: the config does not say."""
        return getattr(config, "vocabulary", None)

    @classmethod
    def adds_bos(cls, config: Any) -> bool:
        """Whether a tokenizer of this config has a `prefix`."""
        return bool(config.add_bos)

    @classmethod
    def train(cls, config: Any, texts: Iterable[str], folder: Path) -> None:
        """Train on `texts` and write the files to `folder`; does nothing unless the traits say `trained`."""

    @classmethod
    def missing(cls, config: Any, folder: Path) -> bool:
        """Whether the tokenizer has to be trained before it can be built."""
        return False

    def save(self, folder: Path) -> None:
        """Copy the files that it was read from into `folder`, which exists; one without files copies none."""

    @classmethod
    def in_folder(cls, config: Any, folder: Path) -> Any:
        """Return `config` for the files that `save` copied into `folder`."""
        return config

    @classmethod
    def sample_bytes(cls, config: Any) -> int:
        """Return the bytes of text that `train` needs."""
        return 0

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone, as a part of a document; special ids never occur, whatever the text contains."""
        raise NotImplementedError

    def encode_document(self, text: str) -> list[int]:
        """Encode a document: `prefix`, the text, and the end-of-document token unless the config leaves it out."""
        return [*self.prefix, *self.encode(text), *([self.eos] if self.config.add_eos else [])]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that a model continues: a document without its end."""
        return [*self.prefix, *self.encode(text)]

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Encode a text in which the name of a special token is that token, as `transformers` reads it; no `prefix`.

        For texts of an evaluation alone: in a corpus such a name is text.
        """
        ids: list[int] = []
        at = 0
        for match in self._special_names[1].finditer(text):
            ids += [*self.encode(text[at : match.start()]), self._special_names[0][match.group()]]
            at = match.end()
        return [*ids, *self.encode(text[at:])]

    @cached_property
    def _special_names(self) -> tuple[dict[str, int], "re.Pattern[str]"]:
        """Ids of the special tokens by name, and a pattern that matches the longest name at a place."""
        names = {
            self.piece(token): token for token, data in enumerate(self.token_bytes()) if not data
        }
        names.pop(UNUSED, None)
        longest_first = sorted(names, key=len, reverse=True)
        return names, re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode `text`, and return for each token the characters [start, stop) of it that the token stands for.

        Tokens of the bytes of one character all have that character. A tokenizer that is not lossless overrides this.
        """
        ids, table = self.encode(text), self.token_bytes()
        characters = [
            index for index, character in enumerate(text) for _ in character.encode("utf-8")
        ]
        ends = list(accumulate((len(table[token]) for token in ids), initial=0))
        assert ends[-1] == len(characters), "the tokens are not the text"
        spans = [
            (characters[start], characters[stop - 1] + 1)
            for start, stop in pairwise(ends)
            if stop > start
        ]
        assert len(spans) == len(ids), "a token of no text"
        return ids, spans

    def piece(self, token: int) -> str:
        """Return the readable form of a token; special tokens by name."""
        raise NotImplementedError

    def token_bytes(self) -> list[bytes]:
        """Return the UTF-8 bytes of each id; empty for special tokens."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode `tokens`; special tokens are skipped, invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.iterate_bytes(tokens)).decode("utf-8", errors="replace")

    def iterate_bytes(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes of each of `tokens`."""
        table = self.token_bytes()
        return (table[int(token)] for token in tokens)

    def byte_lengths(self) -> "NDArray[np.int64]":
        """Return the UTF-8 bytes of each id [V] int64, the divisor of bits per byte; 0 for special tokens."""
        import numpy as np

        return np.array([len(data) for data in self.token_bytes()], dtype=np.int64)


class FileTokenizer(Tokenizer):
    """A tokenizer in a file: the one named in its config, or one trained into the folder."""

    FILE: ClassVar[str]
    """File name of a trained tokenizer."""
    COMPANIONS: ClassVar[tuple[str, ...]] = ()
    """Names of files beside it that other libraries read with it."""

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.file = Path(config.file) if config.file else folder / self.FILE
        """The file that it is read from."""

    def read_file(self) -> bytes:
        """Read the file. ConfigError where it cannot be read."""
        try:
            return read_regular(self.file)
        except OSError as error:
            what = f"the tokenizer cannot be read: {error.strerror}"
            fix = "Run `xscale data tokenizer`, which trains it."
            if self.file.is_dir():
                what = "this is a folder, and no tokenizer"
                fix = "Give the file in it" + _tokenizers_in(self.file)
            elif self.config.file:
                fix = "Give an existing one, or leave data.tokenizer.file out: one is trained."
            raise ConfigError(str(self.file), what, fix) from None

    @classmethod
    def planned_vocabulary(cls, config: Any) -> int | None:
        if config.file and Path(config.file).is_file():
            return cls(config, Path(config.file).parent).vocabulary
        return config.vocabulary or DEFAULT_VOCABULARY

    @classmethod
    def missing(cls, config: Any, folder: Path) -> bool:
        return not config.file and not (folder / cls.FILE).exists()

    def save(self, folder: Path) -> None:
        pairs = [(self.file, folder / self.FILE)]
        pairs += [(self.file.with_name(name), folder / name) for name in self.COMPANIONS]
        for source, copy in pairs:
            if (source == self.file or source.is_file()) and not (
                copy.exists() and copy.samefile(source)
            ):
                write_atomically(copy, read_regular(source))

    @classmethod
    def in_folder(cls, config: Any, folder: Path) -> Any:
        return config.model_copy(update={"file": str(folder / cls.FILE)}) if config.file else config

    @classmethod
    def sample_bytes(cls, config: Any) -> int:
        return 0 if config.file else int(config.sample_bytes)


def _tokenizers_in(folder: Path) -> str:
    """Return the files of a folder that may be a tokenizer, to end a sentence."""
    names = ("tokenizer.json", "*.model")
    files = [str(file) for name in names for file in sorted(folder.glob(name))]
    return (
        f": {' or '.join(files)}." if files else ", which has neither tokenizer.json nor a .model."
    )


def sentinel_ids(id_of: Callable[[str], int | None]) -> range:
    """Return the ids of the sentinels if they are consecutive, ascending or descending; else an empty range.

    `id_of`: the id of a token, None if there is none of that name.
    """
    for pattern in SENTINELS:
        ids: list[int] = []
        while (token := id_of(pattern.format(len(ids)))) is not None:
            ids.append(token)
        step = -1 if len(ids) > 1 and ids[1] < ids[0] else 1
        if ids and ids == list(span := range(ids[0], ids[0] + step * len(ids), step)):
            return span
    return range(0)


def special_tokens(sentinels: int) -> list[str]:
    """Return the names of the special ids, starting at id 0."""
    return [*SPECIAL_TOKENS, *(f"<extra_{index}>" for index in range(sentinels))]


TOKENIZERS = Family("tokenizer", TokenizerTraits, Tokenizer)
