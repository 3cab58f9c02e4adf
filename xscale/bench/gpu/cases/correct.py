"""Job J1: the tests that need a GPU, as many at a time as there are cores."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.harness.machine import ROOT

PROCESSES = 12
FILES = {
    "models": ("tests/gpu/test_models.py",),
    "runs": ("tests/gpu/test_runs.py",),
    "operators": ("tests/kernels/test_on_gpu.py", "tests/kernels/triton"),
    "others": (
        "tests/checkpoint/test_async_saver.py",
        "tests/nn/attention/test_block_sparse_sinks.py",
        "tests/nn/attention/test_flex.py",
        "tests/nn/attention/test_sinks.py",
        "tests/parallel/test_activation_offload.py",
        "tests/parallel/test_flash_ring.py",
    ),
}
"""Every file with a test marked `gpu`: to collect the others would take half a minute in each process."""
OUTCOMES = (
    # With xdist: [gw3] [ 12%] PASSED tests/a.py::test
    re.compile(r"%\] (?P<kind>PASSED|FAILED|ERROR|SKIPPED) (?P<test>tests/.*\S)"),
    re.compile(r"^(?P<test>tests/.*\S) (?P<kind>PASSED|FAILED|ERROR|SKIPPED)\b"),
)
FIRST_FAILURES = 40
"""Failures that get a row."""


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each group of files; none with --no-tests."""
    if not context.tests:
        return []
    return [GpuCase(name, partial(_run, context, name), seconds=400.0) for name in FILES]


def _run(context: GpuContext, name: str, report: CaseReporter) -> None:
    """Run the tests; report each failure at once, and the counts at the end."""
    files = [file for file in FILES[name] if (ROOT / file).exists()]
    # Each process would start as many compilers as there are cores.
    pytest = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    command = ["env", "TORCHINDUCTOR_COMPILE_THREADS=1", sys.executable, *pytest, *files]
    count = min(PROCESSES, os.cpu_count() or 1)
    if find_spec("xdist") is not None and not context.toy:
        command += ["-n", str(count), "--dist", "worksteal"]
    if find_spec("pytest_timeout") is not None:
        command += ["--timeout", "120"]
    counts: dict[str, int] = {}
    report.begin("tests")
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        outcome = outcome_of(line)
        if outcome is None:
            continue
        kind, test = outcome
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("FAILED", "ERROR") and counts[kind] <= FIRST_FAILURES:
            report.figure(test[:160], status="failed", reason="see the log")
    status = process.wait()
    text = (
        ", ".join(f"{number} {kind.lower()}" for kind, number in sorted(counts.items()))
        or "no tests"
    )
    # Without a GPU all are skipped, which is right in a toy run only.
    run = counts.get("PASSED", 0) + (counts.get("SKIPPED", 0) if context.toy else 0)
    good = status == 0 and run > 0
    fields = (
        {} if good else {"status": "failed", "reason": f"pytest ended with status {status}: {text}"}
    )
    report.figure(
        "tests",
        tests={kind.lower(): number for kind, number in counts.items()},
        note=text,
        **fields,
    )


def outcome_of(line: str) -> tuple[str, str] | None:
    """Return the outcome and the test of a line of pytest's output; None for another line."""
    for pattern in OUTCOMES:
        if (match := pattern.search(line)) is not None:
            return match["kind"], match["test"]
    return None
