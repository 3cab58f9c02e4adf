"""Collectives and messages of this process, read from torch's flight recorder, under gloo and NCCL.

Under gloo, point-to-point messages (of a pipeline) are not recorded. Under NCCL an entry is one that the host has
launched: the device may not have come to it.
"""

import pickle
import re
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from xscale.mesh.torch_private import _resolve_process_group, c10d_bindings

TORCH_FILES = ("/torch/", "typing_extensions.py", "<frozen")
"""Files of stack frames between a collective and the line of xscale that called it."""


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of this rank, or one message between two ranks."""

    name: str
    """Name of the operation, such as all_reduce; of a message "send to rank 3" or "receive from rank 3"."""
    group: str
    """Name of the process group in torch, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Ranks of the group."""
    number: int
    """Sequence number in the group; the same collective has the same number on all ranks, messages have their own."""
    completed: bool
    call_site: str
    """The line of xscale that called it."""
    seconds: float
    """Seconds since the call."""
    is_message: bool = False
    """Whether it is a message between two ranks."""


def collective_records() -> list[CollectiveRecord]:
    """Return the recorded collectives and messages, oldest first: the last 2000, or TORCH_FR_BUFFER_SIZE."""
    recorded = dump()
    return [
        _record_of(entry)
        for entry in (pickle.loads(recorded).get("entries", []) if recorded else [])
    ]


def dump() -> bytes:
    """Dump the flight recorder, pickled as `torchfrtrace` reads it; empty for a single process."""
    if not dist.is_initialized():
        return b""
    c10d: Any = c10d_bindings
    dump = c10d._dump_nccl_trace if dist.get_backend() == "nccl" else c10d._dump_fr_trace
    dumped: bytes = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    return dumped


def is_lost_rank(error: Exception) -> bool:
    """Whether an exception means that another rank could not be reached."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _record_of(entry: dict[str, object]) -> CollectiveRecord:
    group = entry["process_group"]
    assert isinstance(group, tuple)
    name = str(entry["profiling_name"]).rpartition(":")[2]
    ranks = _ranks(group[0])
    is_message = bool(entry["is_p2p"])
    over = bool(entry["retired"]) or entry["state"] == "completed"
    seconds = time.time() - int(str(entry["time_created_ns"])) / 1e9
    number = int(str(entry["p2p_seq_id" if is_message else "collective_seq_id"]))
    name = _message_name(name, ranks) if is_message else name
    return CollectiveRecord(
        name, group[0], ranks, number, over, _call_site(entry), seconds, is_message
    )


def _message_name(name: str, ranks: tuple[int, ...]) -> str:
    """Name a message, which torch calls "send 0->1" or "recv 0<-1" by ranks in the group, by the rank at its end."""
    match = re.fullmatch(r"(send|recv) \d+(?:->|<-)(\d+)", name)
    if match is None or int(match[2]) >= len(ranks):
        return name
    return f"{'send to' if match[1] == 'send' else 'receive from'} rank {ranks[int(match[2])]}"


def _ranks(group: str) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
    except (RuntimeError, KeyError, ValueError):  # a group that has been taken down
        return ()


def _call_site(entry: dict[str, object]) -> str:
    frames = entry.get("frames")
    for frame in frames if isinstance(frames, list) else []:
        if not any(part in frame["filename"] for part in TORCH_FILES):
            return f"{frame['filename']}:{frame['line']} {frame['name']}"
    return ""
