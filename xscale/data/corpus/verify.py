"""Verification of prepared data: every byte against the hashes of its manifest, every token against the vocabulary."""

import hashlib
from pathlib import Path

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import check_name, open_regular
from xscale.data.config import DataConfig
from xscale.data.corpus.manifest import MANIFEST, DatasetManifest
from xscale.data.corpus.prepared import check_ids
from xscale.data.corpus.stored_tokenizer import require_fingerprint
from xscale.data.indexed import IndexedDataset, suffixed
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer

BLOCK = 1 << 24
"""Bytes, or tokens, that are read at a time."""
FIX = "Copy it again from where it was prepared, or remove its folder and prepare the data again."


def verify(path: Path) -> list[str]:
    """Verify the prepared data in the folder `path`, or the pair of that prefix; returns a line for each part.

    ConfigError names the first file that is missing or not what was written, or has an id outside the vocabulary.
    """
    if not (path / MANIFEST).exists() and suffixed(path, ".idx").exists():
        largest = largest_id(IndexedDataset(path), 1 << 62)
        return [
            f"{path}: a pair without manifest: its hashes and vocabulary are not known, the largest id is {largest}"
        ]
    manifest = DatasetManifest.load(path / MANIFEST)
    lines = []
    for name, expected in manifest.files.items():
        try:
            file = path / check_name(name)
        except ValueError as error:
            raise ConfigError(
                str(path / MANIFEST), f"the manifest is damaged ({error})", FIX
            ) from None
        actual = sha256(file)
        if actual != expected:
            what = f"its content is not what was written (SHA-256 {actual}, in the manifest {expected})"
            raise ConfigError(str(file), what, FIX)
        lines.append(f"{file}: good")
    if not manifest.files:
        lines.append(f"{path / MANIFEST}: the version that prepared the data recorded no hashes")
    for name in manifest.counts:
        largest = largest_id(IndexedDataset(path / name), manifest.vocabulary)
        lines.append(
            f"{path / name}: the largest id is {largest}, the vocabulary {manifest.vocabulary}"
        )
    config = decode(DataConfig, {"tokenizer": manifest.tokenizer}).tokenizer
    tokenizer: Tokenizer = TOKENIZERS.build(config, path)
    require_fingerprint(tokenizer, manifest.fingerprint, path, "the data was written with", FIX)
    return [*lines, f"{path}: the tokenizer has the fingerprint {tokenizer.fingerprint}"]


def sha256(file: Path) -> str:
    """Hash a file; ConfigError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(file) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise ConfigError(str(file), f"the file cannot be read: {error.strerror}", FIX) from None
    return digest.hexdigest()


def largest_id(indexed: IndexedDataset, vocabulary: int) -> int:
    """Read all tokens and return the largest id; ConfigError for one outside the vocabulary."""
    starts = range(0, len(indexed.tokens), BLOCK)
    return max(
        (check_ids(indexed, vocabulary, start, start + BLOCK) for start in starts), default=-1
    )
