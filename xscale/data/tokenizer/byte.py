"""Bytes as tokens (Xue et al. 2022, ByT5): no training, no unknown, 256 ids after the special ones."""

from pathlib import Path
from typing import Any

from xscale.data.tokenizer.tokenizer import (
    TOKENIZERS,
    UNUSED,
    Tokenizer,
    TokenizerTraits,
    special_tokens,
)

MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that the embedding can be sharded evenly."""


@TOKENIZERS.register("byte", traits=TokenizerTraits(trained=False, lossless=True))
class Byte(Tokenizer):
    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.first = self.sentinels.stop
        """Id of byte 0."""
        self.unpadded_vocabulary = self.first + 256
        self.vocabulary = self.planned_vocabulary(config)
        unused = self.vocabulary - self.unpadded_vocabulary
        self.table = [b""] * self.first + [bytes([value]) for value in range(256)] + [b""] * unused
        self.set_template(f"byte-{config.sentinels}")

    @classmethod
    def planned_vocabulary(cls, config: Any) -> int:
        return -(-(len(special_tokens(config.sentinels)) + 256) // MULTIPLE) * MULTIPLE

    def encode(self, text: str) -> list[int]:
        return [self.first + value for value in text.encode("utf-8")]

    def token_bytes(self) -> list[bytes]:
        return self.table

    def piece(self, token: int) -> str:
        if token < self.first:
            return special_tokens(self.config.sentinels)[token]
        value = self.table[token]
        return (
            value.decode()
            if value and value[0] < 128
            else (f"<0x{value[0]:02X}>" if value else UNUSED)
        )
