"""Repair of torch.compile's cache: a killed compilation or a power cut leaves files that no later run can load.

torch writes a library under its final name, and takes one that is there. Loading an incomplete one fails, or ends the
process with SIGBUS, depending on where the file ends. A generated source is renamed to its name before it is on the
disk: a power cut leaves it empty, or full of zeros.
"""

import os
import struct
import tempfile
import time
from pathlib import Path

from xscale.core.errors import ConfigError, FaultError
from xscale.core.files.file_errors import disk_reason
from xscale.core.files.file_safety import open_regular, remove_file

SETTLED_SECONDS = 5.0
"""An incomplete file that nobody has written to for this time is the rest of a compilation that was killed."""
ELF_HEADER = struct.Struct("<4s36xQ10xHHH")
"""Fields of a 64-bit ELF file: magic; offset, size, number of the section headers; index of their names."""
POLL_SECONDS = 0.1
LIBRARY = ".so"
CHECKED = (LIBRARY, ".py", ".cpp", ".h", ".cu")
"""Endings of libraries and of generated sources."""
PROBE_BYTES = 1 << 16
"""Bytes that a cache with room takes."""


def remove_incomplete_files() -> list[Path]:
    """Remove the incomplete libraries and sources of torch.compile's cache; return their paths.

    Waits for a file that another process is writing. FaultError where one cannot be removed, ConfigError where the
    cache cannot be used.
    """
    removed = []
    for file in _files():
        if _is_or_becomes_complete(file):
            continue
        try:
            remove_file(file.parent, file.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            what = f"{file}: this file of torch.compile's cache is incomplete, because its compilation was killed"
            raise FaultError(
                f"{what}. It cannot be removed ({error.strerror}): remove {file.parent}, and start again"
            ) from error
        removed.append(file)
    return removed


def _files() -> list[Path]:
    folder = None
    try:
        # torch makes the folder when its compiler is imported.
        from xscale.mesh.torch_private import inductor_cache_dir

        folder = Path(inductor_cache_dir())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
        return sorted(path for path in folder.rglob("*") if path.suffix in CHECKED)
    except OSError as error:
        what = (
            f"the cache of torch.compile cannot be used: {error.filename or folder}: "
            f"{disk_reason(error, folder)}"
        )
        fix = "Set TORCHINDUCTOR_CACHE_DIR to a folder that this user can write, or use parallel.compile=false."
        raise ConfigError("parallel.compile", what, fix) from None


def _is_or_becomes_complete(file: Path) -> bool:
    while True:
        try:
            with open_regular(file) as library:
                status, header = os.fstat(library.fileno()), library.read(ELF_HEADER.size)
        except FileNotFoundError:
            return True
        is_complete = _is_complete if file.suffix == LIBRARY else _is_source
        if is_complete(header, status.st_size):
            return True
        if time.time() - status.st_mtime > SETTLED_SECONDS:
            return False
        time.sleep(POLL_SECONDS)


def _is_source(header: bytes, size: int) -> bool:
    """Whether a generated source has a text; a power cut leaves none, or zeros in its place."""
    return size > 0 and not header.startswith(b"\0")


def _is_complete(header: bytes, size: int) -> bool:
    """Whether the section headers, which end an ELF file, are within `size` bytes; a linker writes `header` last."""
    if len(header) < ELF_HEADER.size:
        return False
    magic, offset, entry_size, entries, _ = ELF_HEADER.unpack(header)
    return bool(magic == b"\x7fELF" and entries and offset + entry_size * entries <= size)
