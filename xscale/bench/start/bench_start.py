"""`xscale bench start`: from the command to the first step, and from a kill to the next step, broken down by phase."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import open_run_file, read_run_file
from xscale.mesh.environment import rank_environment
from xscale.run.run_folder import CHECKPOINTS

PHASES = ("imports", "rendezvous", "data", "model", "checkpoint", "other", "first step", "total")
PROGRAM = (
    "import runpy; from xscale.bench.start.worker import prepare; prepare({!r}, {!r}); "
    "runpy.run_module('xscale', run_name='__main__')"
)
"""The command line behind the clock of its start; its arguments follow."""
WAIT = 1800
"""Seconds after which a start that has reached no second step is given up."""
LINES = 15
"""Last lines of a rank's standard error that a message has."""


@dataclass(frozen=True)
class Start:
    """One start: seconds of each phase, and of the step after the first."""

    name: str
    seconds: dict[str, float]
    compiles: bool

    @property
    def compile_seconds(self) -> float:
        """By how much the first step, which compiles, is longer than the second; 0 where nothing is compiled."""
        if not self.compiles:
            return 0.0
        return max(0.0, self.seconds["first step"] - self.seconds["second step"])


def bench_start(config: Path, overrides: list[str], processes: int, compiles: bool) -> list[Start]:
    """Start a run three times: on data to prepare, on prepared data, and after all its ranks were killed.

    ConfigError with what a rank printed where it ends before its second step.
    """
    with tempfile.TemporaryDirectory(prefix="xscale-bench-start-") as folder:
        words = [str(config), *overrides, *_settings(Path(folder))]
        starts = []
        killed = 0.0
        for name, run in (("first", "first"), ("prepared", "second"), ("killed", "second")):
            file = Path(folder, f"{name}.json")
            arguments = [*words, f"run.dir={folder}/{run}"]
            began = time.time() if name != "killed" else killed
            with _ranks(file, began, arguments, processes) as ranks:
                _wait(file, Path(folder, run, CHECKPOINTS), ranks)
                killed = _kill(ranks)
            starts.append(Start(name, decode_json(read_run_file(file)), compiles))
        return starts


def _settings(folder: Path) -> list[str]:
    """Overrides that let a run save after its second step, and do nothing else beside its steps."""
    return [
        *("train.steps=100000", "train.eval_every=0", f"train.sample.prompts={json.dumps([])}"),
        *("checkpoint.every_steps=2", f"data.folder={folder / 'data'}", "observe.progress=false"),
    ]


@contextlib.contextmanager
def _ranks(
    file: Path, began: float, words: list[str], processes: int
) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Start the ranks of the run; those that are left are killed at the end."""
    port = _free_port()
    ranks = []
    try:
        for rank in range(processes):
            result = file if rank == 0 else file.with_suffix(f".{rank}")
            command = [sys.executable, "-c", PROGRAM.format(str(result), repr(began)), "train"]
            with open_run_file(file.with_suffix(f".{rank}.log"), "ab") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, *words],
                        env=rank_environment(rank, processes, port),
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                    )
                )
        yield ranks
    finally:
        _kill(ranks)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(file: Path, checkpoints: Path, ranks: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until rank 0 has written its phases and a checkpoint is there, to which a killed run goes back."""
    deadline = time.time() + WAIT
    while not file.exists() or not any(checkpoints.glob("step-*")):
        for rank, process in enumerate(ranks):
            if process.poll() is not None:
                log = _text(file.with_suffix(f".{rank}.log"))
                what = f"rank {rank} ended with status {process.returncode} before its second step"
                raise ConfigError("start", what, "\n".join(log.splitlines()[-LINES:]))
        if time.time() > deadline:
            raise ConfigError("start", f"no second step within {WAIT} s", "Give a smaller config.")
        time.sleep(0.02)


def _text(log: Path) -> str:
    return read_run_file(log).decode(errors="replace")


def _kill(ranks: "list[subprocess.Popen[bytes]]") -> float:
    """Kill the ranks as a fault would; return when."""
    killed = time.time()
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    for process in ranks:
        process.wait()
    return killed


def show(starts: list[Start]) -> str:
    """Return the starts as a table, a column each."""
    titles = {
        "first": "data to prepare",
        "prepared": "data prepared",
        "killed": "kill to next step",
    }
    lines = [f"{'seconds':12}" + "".join(f"{titles[start.name]:>20}" for start in starts)]
    for phase in PHASES:
        cells = [f"{start.seconds.get(phase, 0.0):20.2f}" for start in starts]
        lines.append(f"{phase:12}" + "".join(cells))
        if phase == "first step" and any(start.compiles for start in starts):
            compiling = [f"{start.compile_seconds:20.2f}" for start in starts]
            lines.append(f"{'  compile':12}" + "".join(compiling))
    return "\n".join(lines)
