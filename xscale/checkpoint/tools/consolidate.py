"""Consolidation of a sharded checkpoint into one safetensors file, tensor by tensor to save memory."""

import json
from pathlib import Path

import torch

from xscale.checkpoint.disk import Digest, Disk
from xscale.checkpoint.errors import CheckpointError
from xscale.checkpoint.index import TensorEntry
from xscale.checkpoint.load import CheckpointReader, read_config
from xscale.checkpoint.tools.tools import find_checkpoint
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import remove_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8


def consolidate(
    path: Path, out: Path, *, only: str = "model.", keep_prefix: bool = False, verify: bool = True
) -> Digest:
    """Write the tensors with prefix `only` to the safetensors file `out` and return the file's digest.

    The prefix is removed from the names unless `keep_prefix`. The run's config goes into the file's metadata.
    ConfigError when `out` exists or no name has the prefix; OSError when `out` cannot be written.
    """
    path = find_checkpoint(path)
    if out.exists():
        raise ConfigError(str(out), "this file already exists", "Give another name, or remove it.")
    reader = CheckpointReader(path, verify=verify)
    entries = {name: entry for name, entry in reader.entries.items() if name.startswith(only)}
    if not entries:
        known = sorted({name.split(".")[0] + "." for name in reader.entries})
        raise ConfigError(
            str(path),
            f"no tensor's name begins with '{only}'",
            f"They begin with: {', '.join(known)}",
        )
    names = {name: name if keep_prefix else name.removeprefix(only) for name in entries}
    disk, part = Disk("sha256"), out.with_name(f".{out.name}.writing")
    try:
        disk.require(out.parent, sum(entry.size for entry in entries.values()))
        with disk.writing(part) as stream:
            stream.write(
                _header(
                    entries,
                    names,
                    {"step": str(reader.manifest.step), "config": json.dumps(read_config(path))},
                )
            )
            for name in entries:
                tensor = reader.tensor(name)
                stream.write(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)
        disk.rename(part, out)
        disk.sync(out.parent)
    except OSError as error:
        remove_file(part.parent, part.name)
        raise OSError(error.errno, error.strerror, str(out)) from error
    return disk.written[part]


def _header(
    entries: dict[str, TensorEntry], names: dict[str, str], metadata: dict[str, str]
) -> bytes:
    """Encode the header of safetensors: its length, then padded JSON with dtype, shape and offsets of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            what = f"its tensor {name} is {entry.dtype}, which safetensors does not support"
            raise CheckpointError(name, what, "Read it with `load_tensors` instead.")
        header[names[name]] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.size],
        }
        offset += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
