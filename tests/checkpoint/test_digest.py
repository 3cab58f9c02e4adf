"""The hash of files: by its definition, whatever the pieces; damage changes it, and older manifests are read."""

import hashlib
import json
import random
from pathlib import Path

import numpy
import pytest
import torch

from xscale.checkpoint import digest, manifest
from xscale.checkpoint.digest import BLOCK, Multilinear, digest_of
from xscale.checkpoint.disk import Disk
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.loading import load_tensors
from xscale.checkpoint.saving import save
from xscale.core.errors import ConfigError

SOME = random.Random(0).randbytes(2 * BLOCK + 1234)


def hashed(*pieces: bytes) -> str:
    found = Multilinear()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def by_hand(data: bytes) -> str:
    """The definition, in Python's whole numbers."""
    low, high = digest.weights().tolist()
    seal = hashlib.sha256()
    padded = data + bytes(-len(data) % 8)
    for start in range(0, len(padded) // BLOCK * BLOCK + 1, BLOCK):
        block = padded[start : start + BLOCK]
        words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)]
        for sums in (
            sum(x * a for x, a in zip(words, low, strict=False)),
            sum((x >> 32) * b for x, b in zip(words, high, strict=False)),
        ):
            seal.update((sums % 2**64).to_bytes(8, "little"))
    seal.update(len(data).to_bytes(8, "little"))
    return seal.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 8, 4099, BLOCK - 1, BLOCK, BLOCK + 1])
def test_it_is_what_it_says(size: int) -> None:
    assert hashed(SOME[:size]) == by_hand(SOME[:size])


def test_it_stays_what_it_was() -> None:
    """Of another version the manifests of this one must still be true."""
    assert hashed(bytes(range(256)) * 17) == "ace3960fcf2e8b3de5ca2fb137e74297f3615f55eb15d322dd8e5ebb5a47940b"


def test_pieces_are_the_whole() -> None:
    draw = random.Random(1)
    for longest, data in ((9, SOME[:3000]), (70_000, SOME), (BLOCK + 100, SOME)):
        pieces, at = [], 0
        while at < len(data):
            pieces.append(data[at : at + draw.randint(0, longest)])
            at += len(pieces[-1])
        assert hashed(*pieces) == hashed(data)


def damaged() -> dict[str, bytes]:
    draw = random.Random(2)
    found = {}
    for number in range(60):
        changed = bytearray(SOME)
        changed[draw.randrange(len(SOME))] ^= 1 << draw.randrange(8)
        found[f"bit {number}"] = bytes(changed)
    for name, bit in (("signs", 63), ("middles", 31), ("lasts", 0)):
        words = numpy.frombuffer(SOME[: BLOCK * 2], "<u8").copy()
        words[[10, 5000, 70_000, 131_000]] ^= numpy.uint64(1 << bit)
        found[f"four {name}"] = words.tobytes() + SOME[2 * BLOCK :]
    found["blocks swapped"] = SOME[BLOCK : 2 * BLOCK] + SOME[:BLOCK] + SOME[2 * BLOCK :]
    found["words swapped"] = SOME[8:16] + SOME[:8] + SOME[16:]
    found["halves swapped"] = SOME[4:8] + SOME[:4] + SOME[8:]
    found["a page of zeros"] = SOME[:8192] + bytes(4096) + SOME[12288:]
    found["cut short"] = SOME[:-1]
    found["longer"] = SOME + b"\0"
    return found


def test_damage_is_seen() -> None:
    assert not [name for name, data in damaged().items() if hashed(data) == hashed(SOME)]


def test_one_sum_would_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an even number of highest bits leaves the sum of the words, and only the halves see it."""
    both = digest.weights().copy()
    both[1] = 0
    monkeypatch.setattr(digest, "weights", lambda: both)
    assert [name for name, data in damaged().items() if hashed(data) == hashed(SOME)] == ["four signs"]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    disk, file = Disk(), tmp_path / "file"
    with disk.writing(file) as stream:
        for piece in (SOME[:3], SOME[3:100_000], SOME[100_000 : 2 * BLOCK], SOME[2 * BLOCK :]):
            stream.write(piece)
    assert file.read_bytes() == SOME
    assert disk.written[file] == digest_of(file)
    assert digest_of(file).value == hashed(SOME)


def saved(folder: Path, disk: Disk | None = None) -> Path:
    return save(folder, 1, {"model.a": torch.arange(300_000.0)}, {}, {}, disk=disk)


def rewrite(path: Path, data: dict[str, object]) -> None:
    text = json.dumps(data).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


def test_the_first_format_is_read(tmp_path: Path) -> None:
    """SHA-256 of every file, and no word of which hash it is."""
    path = saved(tmp_path, Disk("sha256"))
    data = json.loads((path / "manifest.json").read_text())
    data["format"] = 1
    data["files"] = {name: {"size": one["size"], "sha256": one["value"]} for name, one in data["files"].items()}
    rewrite(path, data)
    assert (
        manifest.read(path).files["config.json"].value
        == hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    )
    assert torch.equal(load_tensors(path)["model.a"], torch.arange(300_000.0))
    file = path / "tensors" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamageError, match="its hash differs"):
        load_tensors(path)


def test_a_hash_that_nobody_knows(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = json.loads((path / "manifest.json").read_text())
    for one in data["files"].values():
        one["hash"] = "md17"
    rewrite(path, data)
    with pytest.raises(ConfigError, match=r"hashed by 'md17'.* knows multilinear, sha256"):
        load_tensors(path)
