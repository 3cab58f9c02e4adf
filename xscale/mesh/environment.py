"""Rank information of this process: the only file outside the launcher that uses environment variables."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of this process, as set by torchrun and the launcher."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_single_process(self) -> bool:
        return self.world == 1

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def read_rank_info() -> RankInfo:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are not set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ:
        return RankInfo()
    rank, world, local_rank, local_world = (int(os.environ.get(name, "0" if "RANK" in name else "1")) for name in names)
    return RankInfo(rank, world, local_rank, local_world)


def rendezvous_to_serve() -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT, where rank 0 listens; None without them, or where torchrun itself listens."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdecimal() or not address:
        return None
    return address, int(port)


def set_deepspeed_accelerator(kind: str) -> None:
    """Set the device type, `cpu` or `cuda`, which DeepSpeed reads when it is first imported."""
    os.environ["DS_ACCELERATOR"] = kind


def silence_profiler_log() -> None:
    """Keep torch's profiler from writing to standard error that it starts and stops; a level that is set stays.

    Kineto reads the level when it is first used. These lines have a level of their own above that of its errors, so
    that none below 6 is without them; 4, its default, shows errors too.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments of GPU memory, so that sizes which change do not fragment it.

    A choice that is set stays. torch reads the variable when it is first imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def extend_python_path(folders: Sequence[Path]) -> None:
    """Let the processes that this one starts import from `folders` first."""
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*map(str, folders), *known]))
