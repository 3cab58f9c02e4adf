"""A pointer of Git LFS in the place of a file that a user gives: the sentence says so, whichever reader finds it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_listing import POINTER
from xscale.convert.hf.config_json import read_config_json
from xscale.convert.hf.import_model import open_hf_folder
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import LFS_BYTES, LFS_POINTER, open_regular
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.data.tokenizer.sentencepiece import SentencePiece
from xscale.recipe import read


def prepared(folder: Path, ending: str) -> None:
    """Read prepared data of which one file is a pointer."""
    (folder / "a.txt").write_text("some text\n" * 9)
    source = {"kind": "text", "paths": [str(folder / "a.txt")]}
    data = {"source": source, "tokenizer": {"kind": "byte"}, "folder": str(folder / "data"), "validation": 0}
    settings = decode(DataConfig, data)
    path = prepare(settings, processes=1, progress=False).path
    (path / f"train.{ending}").write_text(POINTER)
    prepare(settings, processes=1, progress=False)


def weights(folder: Path) -> None:
    with open_hf_folder(folder):
        pass


Read = Callable[[Path], Any]
FILES: dict[str, Read] = {
    "tokenizer.json": lambda folder: HuggingFace(HuggingFace.Config(file=str(folder / "tokenizer.json")), folder),
    "tokenizer.model": lambda folder: SentencePiece(SentencePiece.Config(file=str(folder / "tokenizer.model")), folder),
    "config.json": lambda folder: read_config_json(folder, Any),  # type: ignore[arg-type]
    "model.safetensors": weights,
    "model.safetensors.index.json": weights,
    "pytorch_model.bin": weights,
    "train.bin": lambda folder: prepared(folder, "bin"),
    "train.idx": lambda folder: prepared(folder, "idx"),
    "recipe.yaml": lambda folder: read(folder / "recipe.yaml", []),
}
"""File that is a pointer -> what reads it."""


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_in_the_place_of_a_file(name: str, tmp_path: Path) -> None:
    if not name.startswith("train."):
        (tmp_path / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"{name}: .*this is a pointer of Git LFS, and `git lfs pull` fetches"):
        FILES[name](tmp_path)


@pytest.mark.parametrize("content", [b"", LFS_POINTER[:-1], b" " + LFS_POINTER, LFS_POINTER + b" " * LFS_BYTES])
def test_other_files_are_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with open_regular(tmp_path / "file") as file:
        assert file.read() == content


FOLDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "one of transformers": (("tokenizer.json", "config.json"), r"Give the file in it: \S+/tokenizer\.json\."),
    "one of Llama": (("tokenizer.model",), r"Give the file in it: \S+/tokenizer\.model\."),
    "another": (("a.txt",), r"Give the file in it, which has neither tokenizer\.json nor a \.model\."),
}
"""Folder -> its files, and what is said of it."""


@pytest.mark.parametrize("tokenizer", [HuggingFace, SentencePiece])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_in_the_place_of_a_tokenizer(name: str, tokenizer: Any, tmp_path: Path) -> None:
    files, sentence = FOLDERS[name]
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=rf"this is a folder, and no tokenizer\. {sentence}"):
        tokenizer(tokenizer.Config(file=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("tokenizer", [HuggingFace, SentencePiece])
def test_a_tokenizer_that_is_given_is_not_to_be_trained(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory\. Give an existing one, or leave data\.tok"):
        tokenizer(tokenizer.Config(file=str(tmp_path / "none")), tmp_path)
    with pytest.raises(ConfigError, match=r"No such file or directory\. Run `xscale data tokenizer`"):
        tokenizer(tokenizer.Config(), tmp_path)
