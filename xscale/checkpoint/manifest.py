"""The manifest of a checkpoint: size and hash of every file, with a hash of the manifest in a file of its own."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xscale.checkpoint import disk as files_on_disk
from xscale.checkpoint.disk import Digest, Disk
from xscale.checkpoint.errors import DamageError
from xscale.checkpoint.files import (
    CONFIG,
    FORMAT,
    FORMATS,
    INDEX,
    MANIFEST,
    SEAL,
    STATE,
    TENSORS,
    step_of,
)
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import check_relative, decode_json
from xscale.core.files.run_files import kind_of, read_run_file

FIX = "Use another checkpoint, or copy this one again from an intact copy."


@dataclass(frozen=True)
class CheckpointManifest:
    """Content of a checkpoint."""

    step: int
    files: dict[str, Digest]
    """Digests by path relative to the checkpoint's folder; without the manifest and its seal."""
    world: int
    """World size that wrote the checkpoint."""
    written_by: str
    """Versions of xscale and torch."""
    format: int = FORMAT

    @property
    def size(self) -> int:
        return sum(digest.size for digest in self.files.values())


def write(path: Path, manifest: CheckpointManifest, disk: Disk) -> None:
    """Write the manifest and its seal into the folder `path`."""
    files = {name: files_on_disk.to_json(digest) for name, digest in sorted(manifest.files.items())}
    text = (json.dumps(asdict(manifest) | {"files": files}, indent=1) + "\n").encode()
    disk.write(path / MANIFEST, text)
    disk.write(path / SEAL, _seal(text))


def _seal(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def read(path: Path) -> CheckpointManifest:
    """Read the manifest of the checkpoint at `path`.

    DamageError when it is missing, unreadable, changed or of another step than the folder's name, ConfigError when an
    unknown version wrote it.
    """
    try:
        text, seal = read_run_file(path / MANIFEST), read_run_file(path / SEAL)
    except OSError as error:
        what = f"its {MANIFEST} or {SEAL} cannot be read: {error.strerror}"
        raise DamageError(path, what, FIX, "manifest") from None
    if seal != _seal(text):
        raise DamageError(path, f"{MANIFEST} and {SEAL} do not match", FIX, "manifest")
    try:
        data = decode_json(text, unique=True)
        version = data["format"]
    except (ValueError, TypeError, KeyError):
        raise DamageError(path, f"{MANIFEST} is not a manifest", FIX, "manifest") from None
    if type(version) is not int or version not in FORMATS:
        what = f"it has format {version}, and this xscale reads formats {', '.join(str(known) for known in FORMATS)}"
        raise ConfigError(
            str(path), what, f"Read it with the version that wrote it ({data.get('written_by')})."
        )
    try:
        files = {
            name: files_on_disk.from_json(path, digest)
            for name, digest in data.pop("files").items()
        }
        stored = CheckpointManifest(files=files, **data)
        _check_types(stored)
    except (TypeError, KeyError, AttributeError):
        raise DamageError(path, f"{MANIFEST} lacks entries", FIX, "manifest") from None
    except ValueError as error:
        raise DamageError(path, f"{MANIFEST} is not a manifest: {error}", FIX, "manifest") from None
    if step_of(path) not in (None, stored.step):
        what = (
            f"the folder's name says step {step_of(path)} and its manifest says step {stored.step}"
        )
        raise DamageError(path, what, "Give the folder the name of its manifest's step.", "step")
    return stored


def _check_types(manifest: CheckpointManifest) -> None:
    """Raise ValueError, with a clause, unless every field is what `write` writes."""
    if not _is_count(manifest.step) or not _is_count(manifest.world) or manifest.world < 1:
        raise ValueError(f"step {manifest.step!r} or world {manifest.world!r} is no count")
    if not isinstance(manifest.written_by, str):
        raise ValueError(f"written_by is {manifest.written_by!r}")
    for name, digest in manifest.files.items():
        check_relative(name)
        if not _is_count(digest.size):
            raise ValueError(f"the size of {name} is {digest.size!r}")
        if not isinstance(digest.value, str) or not re.fullmatch("[0-9a-f]{32,64}", digest.value):
            raise ValueError(f"the hash of {name} is {digest.value!r}")
    if missing := [
        name for name in (CONFIG, STATE, f"{TENSORS}/{INDEX}") if name not in manifest.files
    ]:
        raise ValueError(f"it does not list {missing[0]}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def tensor_file_sizes(manifest: CheckpointManifest) -> dict[str, int]:
    """Return the bytes of each file in the folder of tensors, by its name there."""
    prefix = f"{TENSORS}/"
    return {
        name.removeprefix(prefix): digest.size
        for name, digest in manifest.files.items()
        if name.startswith(prefix)
    }


def check_sizes(path: Path, manifest: CheckpointManifest) -> None:
    """Raise DamageError when a file is missing or has another size."""
    for name, digest in manifest.files.items():
        file = path / name
        try:
            size, kind = file.lstat().st_size, kind_of(file)
        except OSError:
            raise DamageError(path, f"the file {name} is missing", FIX, "missing") from None
        if kind != "a file":
            raise DamageError(path, f"{name} is {kind}, not a file", FIX, "missing")
        if size != digest.size:
            what = f"the file {name} has {size} bytes and was written with {digest.size}"
            raise DamageError(path, what, FIX, "size")


def check_hashes(
    path: Path, manifest: CheckpointManifest, reader: int = 0, readers: int = 1
) -> None:
    """Raise DamageError when the content of a file changed; of several `readers`, each checks other files."""
    for name in files_to_check(manifest, reader, readers):
        try:
            digest = files_on_disk.hash_file(path / name, manifest.files[name].hash)
        except OSError as error:
            raise DamageError(
                path, f"the file {name} cannot be read: {error.strerror}", FIX, "unreadable"
            ) from None
        if digest != manifest.files[name]:
            raise DamageError(
                path,
                f"the content of {name} is not what was written (its hash differs)",
                FIX,
                "hash",
            )


def files_to_check(manifest: CheckpointManifest, reader: int, readers: int) -> list[str]:
    """Return the files that one of `readers` checks: each gets about the same number of bytes."""
    loads = [0] * readers
    assigned = []
    for name, digest in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += digest.size
        if lightest == reader:
            assigned.append(name)
    return assigned
