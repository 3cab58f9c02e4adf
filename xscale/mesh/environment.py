"""Rank information of this process: the only file outside the launcher that uses environment variables."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xscale.core.errors import ConfigError, Problem

FIX = "Let torchrun, srun, mpirun or `xscale launch` set it, or unset RANK for one process alone."

SHOWN = 40
"""Characters of a variable that a message shows."""


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
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are not set.

    ConfigError where one is no number, or no rank of such a world.
    """
    if "RANK" not in os.environ:
        return RankInfo()
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    problems: list[Problem] = []
    numbers = []
    for name, default in names.items():
        text = os.environ.get(name, str(default))
        numbers.append(int(text) if _is_number(text) else default)
        if not _is_number(text):
            problems.append(
                Problem(name, f"is {text[:SHOWN]!r}, which is no number of a rank or of ranks", FIX)
            )
    rank, world, local_rank, local_world = numbers
    for name, number, of, count in (
        ("RANK", rank, "WORLD_SIZE", world),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world),
    ):
        if not problems and number >= count:
            problems.append(
                Problem(
                    name, f"is {number}, and the ranks of {of}={count} are 0 to {count - 1}", FIX
                )
            )
    if problems:
        raise ConfigError(problems)
    return RankInfo(rank, world, local_rank, local_world)


def leave_other_ranks() -> None:
    """Make this process one alone, for what it starts and reads too, where it was started as one of several."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def rendezvous_to_serve() -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT, where rank 0 listens; None without them, or where torchrun itself listens."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        or not _is_number(port)
        or not address
    ):
        return None
    return address, int(port)


def meeting_place() -> str:
    """MASTER_ADDR:MASTER_PORT, for a message."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def check_rendezvous(world: int) -> None:
    """ConfigError unless MASTER_ADDR and MASTER_PORT say where the ranks of a world of this size meet."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    missing = [
        name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value
    ]
    if missing:
        what = (
            f"{'are' if len(missing) > 1 else 'is'} not set, and RANK and WORLD_SIZE={world} say "
            "that this is one of several processes"
        )
        raise ConfigError(" and ".join(missing), what, FIX)
    if not _is_number(port) or not 0 < int(port) < 2**16:
        raise ConfigError("MASTER_PORT", f"is {port[:SHOWN]!r}, which is no port", FIX)


def is_in_terminal_of_srun() -> bool:
    """Whether `srun --pty` gave this rank its terminal: to the command itself, or to a shell that is one task alone."""
    return _is_task_of_slurm() and "SLURM_PTY_PORT" in os.environ


def _is_task_of_slurm() -> bool:
    return "SLURM_STEP_NUM_TASKS" in os.environ and os.environ.get(
        "SLURM_PROCID"
    ) == os.environ.get("RANK")


def why_ranks_are_missing(world: int) -> str:
    """Say what started this process as one of `world` ranks, and what to do where nothing starts the others."""
    if _is_task_of_slurm():
        shell = "an interactive shell (srun --pty)" if is_in_terminal_of_srun() else "a Slurm step"
        return (
            f"This is task {os.environ['SLURM_PROCID']} of {shell} of {world} tasks, which all have to start this "
            "command: use srun without --pty. For one process alone: env -u SLURM_STEP_NUM_TASKS xscale ..."
        )
    if any(name.startswith("TORCHELASTIC_") for name in os.environ):
        return "torchrun started this rank: start the same torchrun command on every node, or look there why it ended."
    return (
        f"RANK and WORLD_SIZE={world} are set: start every rank with the same MASTER_ADDR and MASTER_PORT, or look why "
        "it ended. For one process alone: env -u RANK xscale ..."
    )


def launcher_stop_seconds() -> float | None:
    """How long the launcher that started this process waits after a signal before it kills it; None: nobody says."""
    try:
        return float(os.environ["XSCALE_STOP_SECONDS"])
    except (KeyError, ValueError):
        return None


def set_deepspeed_accelerator(kind: str) -> None:
    """Set the device type, `cpu` or `cuda`, which DeepSpeed reads when it is first imported."""
    os.environ["DS_ACCELERATOR"] = kind


def bound_mlflow_attempts() -> None:
    """Let MLflow's client give a server up after half a minute, not four, where no variable says how long it tries.

    It is called between steps, and what it could not send is sent again later.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")


def silence_profiler_log() -> None:
    """Keep torch's profiler from writing to standard error that it starts and stops; a level that is set stays.

    Kineto reads the level when it is first used. These lines have a level of their own above that of its errors, so
    that none below 6 is without them; 4, its default, shows errors too.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


WANTED_LOGS = ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TRANSFORMERS_VERBOSITY")
"""Variables by which a user asks libraries for their messages."""


def wants_library_messages() -> bool:
    """Whether a variable asks a library for what it prints, which is then not kept from the terminal."""
    return any(name in os.environ for name in WANTED_LOGS)


def silence_native_logs() -> None:
    """Keep the C++ of torch from writing warnings to standard error; a level that is set stays.

    torch reads the level when it is first imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments of GPU memory, so that sizes which change do not fragment it.

    A choice that is set stays. torch reads the variable when it is first imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables of a process of this machine that is `rank` of `world`; alone it has none of a rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in names}
    values = (rank, world, rank, world, "127.0.0.1", port)
    return variables | (dict(zip(names, map(str, values), strict=True)) if world > 1 else {})


def extend_python_path(folders: Sequence[Path]) -> None:
    """Let the processes that this one starts import from `folders` first."""
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*map(str, folders), *known]))


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how OpenMP's threads wait: the standard's, that of libgomp, and that of libomp and Intel's."""


def wait_passively() -> None:
    """Let OpenMP's waiting threads sleep, not spin, where no variable says how they wait and torch is not imported yet.

    libgomp, which torch's builds for Linux use, reads the variables when torch is imported. Beside other programs its
    threads otherwise spin on the cores that the ones they wait for need.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


SPLIT_OPTION = re.compile(r"(?<=\s)(--[\w-]+)\s+=(\s+(?=\S)|\s*$)")
"""An option with its value in the words of a command line that bash has split at `=`."""


def join_split_options() -> None:
    """Let bash's completion complete `--option=value`: join again what bash splits into three words at `=`.

    An override, `key=value`, stays split, since bash replaces what is behind its `=`. The launcher reads options so.
    """
    line, number = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    is_launcher = line.split()[1:2] in (["launch"], ["doctor"])
    while not is_launcher and number.isdigit() and (match := SPLIT_OPTION.search(line)):
        before = len(line[: match.end(1)].split())
        # The word of the cursor moves to the left by the words before it that are joined: `=`, and the value.
        joined = min(max(int(number) - before + 1, 0), 2 if match.end() < len(line) else 1)
        line, number = f"{line[: match.end(1)]}={line[match.end() :]}", str(int(number) - joined)
    if line:
        os.environ |= {"COMP_WORDS": line, "COMP_CWORD": number}


OPTION_AND_VALUE = re.compile(r"(?<=\s)(--[\w-]+=)(\S*)$")
"""An option with its value, as the last word of a command line."""


def split_joined_option() -> tuple[str, str]:
    """Split the last word, `--option=value`, that zsh or fish asks to complete; return the shell and `--option=`.

    Both are empty for another word, and for bash, which splits it itself. These shells take candidates for whole words.
    """
    shell = os.environ.get("_XSCALE_COMPLETE", "").removeprefix("complete_")
    line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
    match = OPTION_AND_VALUE.search(line)
    if shell not in ("zsh", "fish") or match is None:
        return "", ""
    # Without a value the line ends in a space, behind which a new word begins.
    os.environ["_TYPER_COMPLETE_ARGS"] = f"{line[: match.end(1) - 1]} {match[2]}"
    return shell, match[1]


def waiting_policy() -> str:
    """Return the variables that say how OpenMP's threads wait, `OMP_WAIT_POLICY=PASSIVE`; empty: they spin."""
    return " ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ)


def settings_folder() -> Path:
    """Return the folder of this user's settings, below XDG_CONFIG_HOME or ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "xscale"
