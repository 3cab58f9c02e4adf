"""Run all tests and benchmarks that need a GPU: python kernels/measure_gpu.py FOLDER [--only tests,ops] [--list]

Each step is a process with its own time limit and its own log in FOLDER. A step that fails or times out is recorded and
the others still run; the exit status is then 1. FOLDER/summary.json has each step's command, status, seconds and parsed
output; it is updated after each step, and results of steps that are not selected are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
IMPORT_PATHS = ":".join(str(ROOT / folder) for folder in ("", "kernels", "launch"))
WITH_CHECKOUT = ("sh", "-c", f'PYTHONPATH={IMPORT_PATHS}:$PYTHONPATH exec "$@"', "sh")
"""Prefix that runs a command with this checkout on PYTHONPATH."""
BENCH = (PYTHON, "-m", "xscale", "bench")
FINE = tuple(f"model.stack.block.ffn.{key}" for key in ("experts=64", "router.top_k=8", "expert.hidden=1408"))
"""Overrides: 64 experts of a quarter of the hidden width, 8 a token, so as many active parameters."""


@dataclass(frozen=True)
class GpuStep:
    """One process."""

    group: str
    name: str
    command: tuple[str, ...]
    seconds: float
    """Time limit."""
    read: Callable[[str], Any] | None = None
    """Parses the output for the summary."""
    concurrent: bool = False
    """Whether adjacent steps with this flag run concurrently: tests, which are not timed."""


def operators() -> list[str]:
    """Names of the operators."""
    return sorted(path.parent.name for path in (ROOT / "kernels/xscale_kernels").glob("*/op.py"))


def runs_on_gpu(operator: str) -> bool:
    """Whether an operator has an implementation besides its definition and one for a CPU."""
    names = {path.name for path in (ROOT / "kernels/xscale_kernels" / operator).glob("*.py")}
    return not names <= {"__init__.py", "cases.py", "cpu.py", "op.py"}


def last_json(text: str) -> Any:
    """Parse the last line that is a JSON object."""
    objects = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(objects[-1]) if objects else None


def stalls(text: str) -> dict[str, list[str]]:
    """Parse the stall of each save, and failed saves, from a run's output."""
    return {
        "stall": re.findall(r"saved \S+ \(([^)]+)\)", text),
        "failed": re.findall(r"could not be saved[^\n]*", text),
    }


def tested(text: str) -> str:
    """pytest's last line."""
    summaries = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return summaries[-1].strip("= ") if summaries else ""


def steps(folder: Path) -> list[GpuStep]:
    """List the steps: tests first, then benchmarks, the longest last."""
    pytest = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    device = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())"
    gpu_steps = [
        GpuStep("machine", "device", (PYTHON, "-c", device), 60),
        GpuStep("machine", "nvidia-smi", ("nvidia-smi",), 30),
    ]
    # One process per operator, since compiling a kernel uses one core. Triton caches the compiled kernels, so that the
    # same tests before each benchmark are short.
    for operator in operators():
        files = ("tests/kernels/test_on_gpu.py", "tests/kernels/triton/test_conformance.py")
        words = f"[{operator}- or [{operator}]"
        gpu_steps.append(
            GpuStep("tests", f"test-{operator}", (*pytest, *files, "-k", words), 420, tested, concurrent=True)
        )
    remaining_tests = (
        "tests",
        "--ignore=tests/kernels/test_on_gpu.py",
        "--ignore=tests/kernels/triton/test_conformance.py",
    )
    gpu_steps.append(GpuStep("tests", "test-rest", (*pytest, *remaining_tests), 420, tested, concurrent=True))
    record = ("--device", "cuda", "--record", "--into", str(folder / "results"), "--plot", str(folder / "plots"))
    for operator in operators():
        if not runs_on_gpu(operator):
            continue
        against = ("--against", "sdpa,eager" if "attention" in operator else "eager")
        gpu_steps.append(GpuStep("ops", f"bench-{operator}", (*BENCH, operator, *against, *record), 105))
    parts = (PYTHON, "-m", "xscale_kernels.bench.parts")
    gpu_steps.append(GpuStep("parts", "kernel-parts", parts, 100, last_json))
    moe = (*BENCH, "moe", "--json", "--rounds", "30", "--tokens", "16384", "--width", "2048", "--hidden", "5632")
    fine = ("--width", "2048", "--hidden", "1024", "--experts", "64", "--top-k", "8")
    gpu_steps += [
        GpuStep("moe", "moe-layer-coarse", (*moe, "--experts", "8", "--top-k", "2"), 180, last_json),
        GpuStep("moe", "moe-layer-fine", (*moe[:-4], *fine), 180, last_json),
        GpuStep("train", "dense-1b", (*BENCH, "train", "configs/run/dense_1b.yaml", *at(folder, 12)), 260, last_json),
        GpuStep("train", "moe-coarse", (*BENCH, "train", "configs/run/moe_gpu.yaml", *at(folder, 8)), 260, last_json),
        GpuStep(
            "train", "moe-fine", (*BENCH, "train", "configs/run/moe_gpu.yaml", *at(folder, 8), *FINE), 210, last_json
        ),
        GpuStep("checkpoint", "checkpoint-stall", checkpointed(folder), 240, stalls),
    ]
    return gpu_steps


def at(folder: Path, rounds: int) -> tuple[str, ...]:
    """Overrides of a benchmarked run: folders and number of steps."""
    return (f"run.dir={folder}/run", f"data.folder={folder}/data", "--json", "--steps", str(rounds))


def checkpointed(folder: Path) -> tuple[str, ...]:
    """Command of a run that saves 16 GB twice, asynchronously."""
    return (
        PYTHON, "-m", "xscale", "train", "configs/run/dense_1b.yaml", f"run.dir={folder}/checkpointed",
        f"data.folder={folder}/data", "parallel.compile=false", "train.steps=60", "checkpoint.every_steps=30",
        "observe.tensorboard=false", "run.fresh=true",
    )  # fmt: skip


def run(step: GpuStep, folder: Path) -> dict[str, Any]:
    """Run a step to its end or its time limit; its output goes to FOLDER/NAME.log."""
    log, begin = folder / f"{step.name}.log", time.monotonic()
    with log.open("w") as out:
        try:
            # A process group of its own, so that the step's subprocesses are killed with it.
            process = subprocess.Popen(
                (*WITH_CHECKOUT, *step.command), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return {"status": "failed", "said": str(error), "seconds": 0.0}
        try:
            code = process.wait(step.seconds)
            status = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"timed out after {step.seconds:.0f} s"
    text = log.read_text(errors="replace")
    outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
    if step.read is not None:
        try:
            outcome["found"] = step.read(text)
        except ValueError as error:
            outcome |= {"status": "failed (its output)", "said": str(error)}
    if outcome["status"] != "done":
        outcome["said"] = text[-600:]
    return outcome


def measure(
    wanted: Sequence[GpuStep], folder: Path, width: int, report: Callable[[GpuStep, dict[str, Any]], None]
) -> None:
    """Run the steps in order; concurrent ones run `width` at a time."""
    waiting = list(wanted)
    while waiting:
        batch = [waiting.pop(0)]
        while batch[0].concurrent and waiting and waiting[0].concurrent:
            batch.append(waiting.pop(0))
        with ThreadPoolExecutor(width) as pool:
            for step, outcome in zip(batch, pool.map(lambda queued: run(queued, folder), batch), strict=True):
                report(step, outcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every step succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="groups or steps, separated by commas: tests,ops,moe,train ...")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits, and run nothing")
    parser.add_argument("--width", type=int, default=8, help="tests that run concurrently")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    every = steps(folder)
    names = {name for name in arguments.only.split(",") if name}
    if unknown := names - {step.group for step in every} - {step.name for step in every}:
        print(f"unknown step or group: {', '.join(sorted(unknown))}; --list prints them", file=sys.stderr)
        return 2
    wanted = [step for step in every if not names or names & {step.group, step.name}]
    if arguments.list:
        for step in wanted:
            print(f"{step.group:11} {step.name:32} {step.seconds:5.0f} s  {' '.join(step.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def report(step: GpuStep, outcome: dict[str, Any]) -> None:
        summary[step.name] = {"group": step.group, "command": " ".join(step.command), **outcome}
        file.write_text(json.dumps(summary, indent=1) + "\n")
        print(
            f"{step.name}: {outcome['status']} after {outcome['seconds']} s {outcome.get('found', '')}"[:300],
            flush=True,
        )

    measure(wanted, folder, arguments.width, report)
    return 0 if all(summary[step.name]["status"] == "done" for step in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
