"""`xscale data verify`: a flipped byte, an id of no token and another tokenizer are found and named; exit status 2."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import text_config
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.manifest import MANIFEST, DatasetManifest
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import PreparedData, open_prepared
from xscale.data.corpus.verify import verify
from xscale.data.indexed import IndexedWriter
from xscale.data.tokenizer.byte import Byte


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedData:
    return prepare(text_config(tmp_path), processes=1, progress=False)


def without_hashes(folder: Path) -> None:
    """Make the folder one whose manifest has no hashes."""
    replace(DatasetManifest.load(folder / MANIFEST), files={}).save(folder / MANIFEST)


def test_what_was_prepared_is_good(prepared: PreparedData) -> None:
    lines = verify(prepared.path)
    assert [line.split("/")[-1] for line in lines[:4]] == [
        f"{name}: good" for name in ("train.bin", "train.idx", "validation.bin", "validation.idx")
    ]
    ids = np.concatenate((prepared.train.tokens, prepared.validation.tokens if prepared.validation else []))
    assert f"the largest id is {max(ids)}, the vocabulary {prepared.tokenizer.vocabulary}" in "".join(lines)


@pytest.mark.parametrize("name", ["train.bin", "validation.idx"])
def test_a_flipped_bit_is_named(prepared: PreparedData, name: str) -> None:
    file = prepared.path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    command = [sys.executable, "-m", "xscale", "data", "verify", str(prepared.path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"{file}: its content is not what was written" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["../other", "/dev/zero", "..", "a/b"])
def test_a_manifest_names_only_files_of_its_folder(prepared: PreparedData, name: str) -> None:
    """Even a hash that fits says nothing of a file elsewhere."""
    data = json.loads((prepared.path / MANIFEST).read_text())
    (prepared.path.parent / "other").write_bytes(b"")
    data["files"] = {name: hashlib.sha256(b"").hexdigest()}
    (prepared.path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"manifest\.json: the manifest is damaged .* is not the name of a file"):
        verify(prepared.path)


def write_id(folder: Path, token: int, at: int) -> Path:
    """A pair in `folder` whose token number `at` is `token`."""
    folder.mkdir()
    writer = IndexedWriter(folder / "pair", np.uint16)
    tokens = np.full(1 << 20, 200)
    tokens[at] = token
    for part in np.split(tokens, 8):
        writer.add(part)
    writer.finish()
    return folder / "pair"


def test_an_id_of_no_token(tmp_path: Path) -> None:
    """Seen before a run starts where the sample meets it; anywhere by `verify`, which needs the vocabulary for it."""
    config = DataConfig(tokenizer=Byte.Config(), validation=0.2)
    good = write_id(tmp_path / "good", 300, 7)
    open_prepared(config.model_copy(update={"prepared": str(good)}))
    first = write_id(tmp_path / "first", 60000, 7)
    with pytest.raises(ConfigError, match="contains token 60000, but the tokenizer's vocabulary is 384"):
        open_prepared(config.model_copy(update={"prepared": str(first)}))
    assert "hashes and vocabulary are not known, the largest id is 60000" in verify(first)[0]


def test_an_id_of_no_token_between_the_sampled_ones(prepared: PreparedData) -> None:
    without_hashes(prepared.path)
    assert "recorded no hashes" in verify(prepared.path)[0]
    tokens = np.memmap(prepared.path / "train.bin", dtype=prepared.train.tokens.dtype, mode="r+")
    tokens[len(tokens) // 3] = 5000
    tokens.flush()
    with pytest.raises(ConfigError, match=r"train\.bin: the data contains token 5000.*vocabulary is 384"):
        verify(prepared.path)


def test_another_tokenizer(prepared: PreparedData) -> None:
    data = json.loads((prepared.path / MANIFEST).read_text())
    (prepared.path / MANIFEST).write_text(json.dumps(data | {"fingerprint": "byte-7"}))
    with pytest.raises(ConfigError, match="fingerprint byte-100, and the data was written with byte-7"):
        verify(prepared.path)
