"""The schedule of `xscale bench gpu`: jobs by worth, each within its limit, their sum within that of the command.

Cases run in a worker process. One that hangs is killed, and one that crashes costs the row of the side that it was
measuring: the case is run again without the sides that were begun.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.bench.gpu.jobs import GpuJob, choose_jobs
from xscale.bench.gpu.processes import WorkerEndedError, WorkerPool
from xscale.bench.gpu.results import GpuResults
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError
from xscale.core.files.file_safety import remove_folder
from xscale.mesh.environment import extend_python_path

ROOT = Path(__file__).parents[3]
RETRIES = 5
"""How often a case is run again after a crash or a timeout, without the sides that were begun."""
PACK_SECONDS = 10.0
"""Kept for the start, and for plots and logs at the end."""
GOOD = ("measured", "refused")


@dataclass(frozen=True)
class GpuOptions:
    """The options of the command."""

    seconds: float
    out: Path
    device: str
    toy: bool
    tests: bool

    def check(self) -> None:
        """Raise ConfigError for options that do not fit."""
        if self.seconds < 10:
            raise ConfigError(
                "--seconds", f"must be at least 10, got {self.seconds:g}", "Give 420 for one call."
            )
        if self.device not in ("cuda", "cpu"):
            raise ConfigError("--device", f"must be cuda or cpu, got {self.device!r}", "Give cuda.")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(
                "--out", f"{self.out} is not a folder", "Give a folder, which may be new."
            )
        if self.device == "cpu" and not self.toy:
            raise ConfigError("--device", "full sizes take hours on a CPU", "Add --toy.")


class GpuMeasurement:
    """One run of the command."""

    def __init__(self, options: GpuOptions, work: Path, say: Callable[[str], None]) -> None:
        self._end = time.monotonic() + options.seconds - min(PACK_SECONDS, options.seconds / 10)
        self._logs, self._say = work / "logs", say
        self._logs.mkdir()
        self._reported = ""
        self.results = GpuResults(
            options.out, {"seconds": options.seconds, "device": options.device, "machine": {}}
        )
        worker_options = {
            "device": options.device,
            "toy": options.toy,
            "tests": options.tests,
            "work": str(work),
            "out": str(options.out),
        }
        self._pool = WorkerPool(worker_options, self._logs, ROOT)

    def run(self, jobs: Sequence[GpuJob]) -> None:
        """Run the jobs, and leave the files."""
        try:
            for number, job in enumerate(jobs):
                self._run_job(job, number == 0)
                self.results.pack(self._logs)
        finally:
            self._pool.close()
            self._finish()

    def _finish(self) -> None:
        self.results.pack(self._logs)
        for line in self.results.limit_sizes():
            self._say(line)
        try:
            self.results.plot()
        except Exception as error:
            # The figures are written; a plot is a copy of them.
            self._say(f"no plots: {type(error).__name__}: {error}")

    def _run_job(self, job: GpuJob, first: bool) -> None:
        begin = time.monotonic()
        end = min(begin + job.seconds, self._end)
        try:
            if first or not self.results.header["machine"]:
                self.results.header["machine"] = self._ask({"machine": True}, end)["machine"]
            cases = self._ask({"module": job.module}, end)["cases"]
        except (TimeoutError, WorkerEndedError, KeyError) as error:
            self._pool.discard()
            self._add(
                job, "all", {"side": "", "status": "not run", "reason": str(error) or "out of time"}
            )
            return
        for name, seconds in cases:
            self._run_case(job, name, seconds, end)
        self._say(f"{job.id} {job.name}: {time.monotonic() - begin:.0f} s")

    def _ask(self, message: Mapping[str, Any], end: float) -> dict[str, Any]:
        """Return the answer of a worker, and the row of an error if there is one."""
        worker = self._pool.worker(end)
        worker.send(message)
        answer: dict[str, Any] = {}
        while True:
            event = worker.receive(end)
            if event is None:
                raise TimeoutError("out of time")
            if "row" in event:
                raise WorkerEndedError(event["row"]["reason"])
            answer |= event
            if "done" in event:
                return answer

    def _run_case(self, job: GpuJob, name: str, seconds: float, end: float) -> None:
        begun: list[str] = []
        for _ in range(1 + RETRIES):
            if time.monotonic() >= end:
                if not begun:
                    self._add(job, name, {"side": "", "status": "not run", "reason": "out of time"})
                return
            before = len(begun)
            problem = self._follow(job, name, begun, seconds, end)
            if problem is None:
                return
            self._pool.discard()
            # The last side that began may have its figure already.
            side = begun[-1] if begun and begun[-1] != self._reported else ""
            self._add(job, name, {"side": side, **problem})
            if len(begun) == before:
                return

    def _follow(
        self, job: GpuJob, name: str, begun: list[str], seconds: float, end: float
    ) -> dict[str, Any] | None:
        """Run the case without the sides in `begun`, to which those that begin are added.

        Returns None at its end, and the status and reason of the row for a side that did not end.
        """
        try:
            worker = self._pool.worker(end)
            worker.send({"module": job.module, "case": name, "skip": list(begun)})
            while True:
                limit = min(time.monotonic() + seconds, end)
                event = worker.receive(limit)
                if event is None:
                    reason = "out of time" if limit == end else f"no figure for {seconds:.0f} s"
                    return {"status": "timed out", "reason": reason}
                if "begin" in event:
                    begun.append(event["begin"])
                    self._reported = ""
                if "row" in event:
                    self._reported = begun[-1] if begun else ""
                    self._add(job, name, event["row"])
                if "done" in event:
                    if not event["usable"]:
                        self._pool.discard()
                    return None
        except (WorkerEndedError, TimeoutError) as error:
            return {"status": "crashed", "reason": str(error)}

    def _add(self, job: GpuJob, case: str, row: Mapping[str, Any]) -> None:
        # A case of several sizes names each in its rows.
        label = row.get("case", case)
        self.results.add(
            {
                "job": job.id,
                "case": label,
                **{key: value for key, value in row.items() if key != "case"},
            }
        )
        self._say(line_of(self.results.rows[-1]))


def line_of(row: Mapping[str, Any]) -> str:
    """Format a row as a line of text."""
    figures = []
    for name, unit in (
        ("milliseconds", "ms"),
        ("tokens_per_second", "tokens/s"),
        ("tflops", "TFLOP/s"),
        ("megabytes", "MB"),
    ):
        if name in row:
            figures.append(f"{row[name]:,.{3 if name == 'milliseconds' else 0}f} {unit}")
    figures += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    figures += (
        [f"{row['speedup']:.2f}x of {row.get('baseline', 'the baseline')}"]
        if "speedup" in row
        else []
    )
    figures += [str(row["note"])] if "note" in row else []
    text = (
        "  ".join(figures)
        if row["status"] == "measured"
        else f"{row['status']}: {row.get('reason', '')}"
    )
    return f"{row['job']} {row['case']}: {row['side']}  {text}"


def measure(jobs: Sequence[GpuJob], options: GpuOptions, say: Callable[[str], None]) -> int:
    """Measure within `options.seconds`; return 0 if every row has its figures or a refusal."""
    options.check()
    extend_python_path([ROOT, ROOT / "kernels", ROOT / "launch"])
    work = Path(tempfile.mkdtemp(prefix="xscale-bench-gpu-"))
    try:
        measurement = GpuMeasurement(options, work, say)
        measurement.run(jobs)
    finally:
        remove_folder(work.parent, work.name)
    rows = measurement.results.rows
    missing = [row for row in rows if row["status"] not in GOOD]
    say(f"{len(rows)} rows, {len(missing)} without figures; {options.out / 'results.json'}")
    return EXIT_DONE if rows and not missing else EXIT_FAULT


def bench(only: Sequence[str], options: GpuOptions, *, list_only: bool) -> int:
    """Run or list the chosen jobs; return the exit status."""
    jobs = choose_jobs(only)
    if list_only:
        for job in jobs:
            print(f"{job.id:<4}{job.name:<12}{job.seconds:>5.0f} s  {job.measures}")
        return EXIT_DONE
    return measure(jobs, options, lambda line: print(line, flush=True))
