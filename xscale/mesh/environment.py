"""Rank information of this process: the only file outside the launcher that uses environment variables."""

import os
import sys
from dataclasses import dataclass


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


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how OpenMP's threads wait: the standard's, that of libgomp, and that of libomp and Intel's."""


def wait_passively() -> None:
    """Let OpenMP's waiting threads sleep, not spin, where no variable says how they wait and torch is not imported yet.

    libgomp, which torch's builds for Linux use, reads the variables when torch is imported. Beside other programs its
    threads otherwise spin on the cores that the ones they wait for need.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def waiting_policy() -> str:
    """Return the variables that say how OpenMP's threads wait, `OMP_WAIT_POLICY=PASSIVE`; empty: they spin."""
    return " ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ)
