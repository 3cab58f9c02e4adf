"""Tokens a second of the quickstart alone and beside one busy process, printed for people: `pytest -s` shows them.

A machine that does nothing else is to run it; nothing is held to a time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 3
STEPS = 12
FIRST = 3
"""Steps that warm up, and are not counted."""

pytestmark = [pytest.mark.nightly, pytest.mark.long]


@contextmanager
def busy_process() -> "Iterator[subprocess.Popen[bytes]]":
    """Keep one core busy in a process of its own, and end it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tokens_per_second(folder: Path) -> float:
    """Train the quickstart with the default number of threads, and return the median over its later steps."""
    command = [sys.executable, "-m", "xscale", "train", "quickstart", f"run.dir={folder}", f"train.steps={STEPS}"]
    command += ["train.eval_every=0", "train.baseline=false", "train.sample.prompts=[]", "observe.every_steps=1"]
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    # conftest.py sets one thread for the tests; what is measured is what a user has who sets nothing.
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": paths},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return median(row["tokens_per_second"] for row in rows if row.get("step", 0) > FIRST and "tokens_per_second" in row)


def test_the_quickstart_alone_and_beside_a_busy_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone, beside = [], []
    for number in range(ROUNDS):
        alone.append(tokens_per_second(tmp_path / f"alone{number}"))
        with busy_process():
            beside.append(tokens_per_second(tmp_path / f"beside{number}"))
    with capsys.disabled():
        print()
        for name, rates in (("alone", alone), ("beside one busy process", beside)):
            listed = ", ".join(f"{rate:,.0f}" for rate in rates)
            print(f"{name:24} {median(rates):8,.0f} tokens/s (rounds: {listed})")
        print(f"beside a busy process the quickstart runs at {median(beside) / median(alone):.2f}x of its speed alone")


def test_the_busy_process_is_gone_afterwards() -> None:
    with busy_process() as process:
        assert process.poll() is None
    assert process.poll() is not None
