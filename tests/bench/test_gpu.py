"""The command that measures on a GPU: faults cost one row each, its time and its files are bounded."""

import importlib
import json
import shlex
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from xscale.bench.gpu import pages
from xscale.bench.gpu.case import GpuContext, failure_of
from xscale.bench.gpu.cases.packed import document_ids, visible_pairs
from xscale.bench.gpu.jobs import JOBS, GpuJob, choose_jobs
from xscale.bench.gpu.measure import GpuOptions, measure
from xscale.bench.gpu.results import FILE_BYTES, FILES
from xscale.cli.main import app
from xscale.core.errors import ConfigError
from xscale_kernels.select import UnusableError

PLANTED = replace(JOBS[3], id="J0", name="planted", module="tests.bench.planted_gpu_job", seconds=300.0)


def options(folder: Path, seconds: float) -> GpuOptions:
    return GpuOptions(seconds, folder, "cpu", toy=True, tests=False)


@pytest.mark.long
def test_each_fault_costs_one_row(tmp_path: Path) -> None:
    said: list[str] = []
    assert measure([PLANTED], options(tmp_path / "out", 300.0), said.append) == 1
    results = json.loads((tmp_path / "out/results.json").read_text())
    statuses = {(row["case"], row["side"]): row["status"] for row in results["rows"]}
    assert len(results["rows"]) == len(statuses)
    assert {key: status for key, status in statuses.items() if status != "measured"} == {
        ("slow", "hangs"): "timed out",
        ("memory", "large"): "out of memory",
        ("crash", "crashes"): "crashed",
        ("raises", ""): "failed",
    }
    assert {key for key, status in statuses.items() if status == "measured"} == {
        *((case, side) for case in ("slow", "memory", "crash") for side in ("before", "after")),
        ("good", "ours"),
    }
    reasons = {row["case"]: row["reason"] for row in results["rows"] if "reason" in row}
    assert reasons["slow"] == "no figure for 2 s"
    assert "ended by SIGSEGV" in reasons["crash"]
    assert "broken case" in reasons["raises"]
    assert results["machine"]["torch"]
    assert results["machine"]["toy"] is True
    check_files(tmp_path / "out")
    with tarfile.open(tmp_path / "out/logs.tgz") as archive:
        text = b"".join(archive.extractfile(name).read() for name in archive.getnames())  # type: ignore[union-attr]
    assert b"a line of the log" in text
    assert any("planted" in line for line in said)


def check_files(folder: Path) -> None:
    """The files fit into what a job on a cluster can bring back: few, flat and small."""
    files = list(folder.iterdir())
    assert {"results.json", "logs.tgz"} <= {file.name for file in files}
    assert len(files) <= FILES
    assert all(file.is_file() and file.stat().st_size < FILE_BYTES for file in files)


@pytest.mark.long
def test_the_command_ends_within_its_seconds_and_says_what_was_not_run(tmp_path: Path) -> None:
    """The second case hangs for longer than the whole command has."""
    begin = time.monotonic()
    long_job = replace(PLANTED, id="J9", seconds=500.0)
    assert measure([replace(PLANTED, seconds=0.0), long_job], options(tmp_path / "out", 12.0), lambda line: None) == 1
    assert time.monotonic() - begin < 120
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert rows[0] == {"job": "J0", "case": "all", "side": "", "status": "not run", "reason": rows[0]["reason"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 5.0}, "must be at least 10"),
        ({"device": "tpu"}, "must be cuda or cpu"),
        ({"toy": False}, "Add --toy"),
    ],
)
def test_options_are_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(options(tmp_path, 60.0), **changes).check()  # type: ignore[arg-type]


def test_jobs_are_chosen_by_id_or_name() -> None:
    assert [job.id for job in choose_jobs(["decode", "j2"])] == ["J2", "J8"]
    assert [job.id for job in choose_jobs([])] == [f"J{number}" for number in range(1, 12)]
    with pytest.raises(ConfigError, match="there is no job 'decod'"):
        choose_jobs(["decod"])


def test_the_commands_of_the_queue_run_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of the page starts the job that it names, with as many seconds as the job has and some to begin."""
    started: list[tuple[list[str], GpuOptions]] = []

    def record(jobs: Sequence[GpuJob], options: GpuOptions, say: object) -> int:
        started.append(([job.id for job in jobs], options))
        return 0

    monkeypatch.setattr("xscale.bench.gpu.measure.measure", record)
    text = pages.QUEUE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("PYTHONPATH=") and " xscale bench gpu " in line]
    for line in lines:
        words = shlex.split(line)
        result = CliRunner().invoke(app, words[words.index("xscale") + 1 :])
        assert result.exit_code == 0, (line, result.output)
    # The first is the example above the table.
    (example, *queue) = started
    assert example[0] == ["J1"]
    assert [jobs for jobs, _ in queue] == [[job.id] for job in JOBS]
    assert all(job.seconds < options.seconds <= 480 for job, (_, options) in zip(JOBS, queue, strict=True))
    assert len({options.out for _, options in queue}) == len(JOBS)


def test_the_pages_are_those_of_the_jobs_and_of_their_results() -> None:
    assert pages.main([]) == 0, "run python -m xscale.bench.gpu.pages --write"
    assert "| J1 | `correct` |" in pages.queue_table()


def test_the_table_has_the_newest_figure_of_each_case(tmp_path: Path) -> None:
    def results(date: str, milliseconds: float, **machine: object) -> dict[str, Any]:
        row = {"job": "J4", "case": "rmsnorm", "side": "triton", "status": "measured", "milliseconds": milliseconds}
        lost = {"job": "J4", "case": "rmsnorm", "side": "quack", "status": "failed", "reason": "no"}
        return {"machine": {"device": "GPU A", "date": date, "commit": "abc", **machine}, "rows": [row, lost]}

    for number, content in enumerate(
        (results("2026-01-02", 2.0), results("2026-01-01", 1.0), results("2026-01-03", 9.0, toy=True))
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content))
        assert pages.keep(file, tmp_path).name == f"gpu-gpu-a-j4-{content['machine']['date']}.json"
    table = pages.results_table(pages.read_results(tmp_path))
    assert table.splitlines() == [
        "### GPU A", "", "| job | case | side | ms | commit |", "|---|---|---|--:|---|",
        "| J4 | rmsnorm | triton | 2.000 | abc |",
    ]  # fmt: skip
    assert pages.results_table([]) == "No job has been run on a GPU yet.\n"


@pytest.mark.parametrize("job", JOBS, ids=[job.id for job in JOBS])
def test_each_job_lists_its_cases_without_computing(tmp_path: Path, job: GpuJob) -> None:
    context = GpuContext("cpu", toy=True, tests=True, work=tmp_path, out=tmp_path)
    listed = importlib.import_module(job.module).cases(context)
    assert listed
    assert len({case.name for case in listed}) == len(listed)
    assert all(0 < case.seconds <= job.seconds for case in listed)


def test_pairs_of_a_packed_batch_are_counted() -> None:
    documents = document_ids(2, 40, 4, torch.device("cpu"))
    pairs = (documents[:, :, None] == documents[:, None]).tril()
    assert visible_pairs(documents) == float(pairs.sum())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ("out of memory", "OutOfMemoryError: CUDA out of memory")),
        (RuntimeError("cuDNN: out of memory"), ("out of memory", "RuntimeError: cuDNN: out of memory")),
        (UnusableError("needs a GPU"), ("refused", "UnusableError: needs a GPU")),
        (ValueError(), ("failed", "ValueError")),
    ],
)
def test_the_status_of_a_failure(error: Exception, outcome: tuple[str, str]) -> None:
    assert failure_of(error) == outcome


@pytest.mark.nightly
def test_every_job_runs_at_toy_size_on_a_cpu(tmp_path: Path) -> None:
    """All jobs, with the planted faults among them, end within their seconds; only planted faults lack figures."""
    begin, seconds = time.monotonic(), 1200.0
    assert measure([PLANTED, *JOBS[1:-1]], options(tmp_path / "out", seconds), print) == 1
    assert time.monotonic() - begin < seconds + 30
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert {row["job"] for row in rows} == {"J0", *(job.id for job in JOBS[1:-1])}
    lost = [row for row in rows if row["status"] not in ("measured", "refused")]
    assert [row["job"] for row in lost] == ["J0"] * 4, lost
    check_files(tmp_path / "out")
    assert (tmp_path / "out/profile.json.gz").exists()
