"""Stop signals: what follows is said at once, whatever the process is in, and a second Ctrl-C ends it."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xscale.watchdog.watchdog import StopSignal
from xscale_launch.supervise import children

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib
from xscale.watchdog.watchdog import StopSignal
with StopSignal(speaks={speaks}) as stop:
    if {training}:
        stop.training_begins()
    print("ready", flush=True)
    # A call that does not return to the interpreter, in which Python's handlers run.
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
    print(f"stopped by {{stop.cause}}", flush=True)
"""


def started(*, training: bool = True, speaks: bool = True, rounds: int = 10**9) -> "subprocess.Popen[str]":
    """The program above, in its context."""
    program = PROGRAM.format(training=training, speaks=speaks, rounds=rounds)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_first_ctrl_c_says_what_follows_and_the_second_ends_the_process() -> None:
    process = started()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said.startswith("xscale: SIGINT: finishing this step, then saving; press Ctrl-C again"), said
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "at once" in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_step_is_finished_after_one_signal(number: signal.Signals) -> None:
    process = started(rounds=2 * 10**6)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert out == f"stopped by {number.name}\n"
    assert err.startswith(f"xscale: {number.name}: finishing this step")
    assert len(err.splitlines()) == 1


def test_other_ranks_say_nothing() -> None:
    process = started(speaks=False, rounds=2 * 10**6)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=600) == ("stopped by SIGTERM\n", "")


def test_before_training_there_is_nothing_to_finish() -> None:
    process = started(training=False, rounds=2 * 10**6)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert out == ""
    assert err.strip().endswith("KeyboardInterrupt")


def wait_until_in_library(process: "subprocess.Popen[str]") -> None:
    """Wait until a child of the process, which has loaded the library and then does nothing else, computes in it."""
    ticks: dict[int, int] = {}
    while process.poll() is None:
        for child in children(process.pid):
            with contextlib.suppress(OSError):
                if "_sentencepiece" in Path(f"/proc/{child}/maps").read_text(errors="replace"):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    used = int(fields[11]) + int(fields[12])
                    if used - ticks.setdefault(child, used) > 20:
                        return
        time.sleep(0.05)
    pytest.fail("the process ended before its tokenizer was being trained")


@pytest.mark.long
@pytest.mark.parametrize("words", [["data", "tokenizer"], ["train"]])
def test_training_of_a_tokenizer_says_so_and_stops_at_once(words: list[str], tmp_path: Path) -> None:
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklm", k=draw.randint(2, 9))) for _ in range(30_000)]
    lines = (" ".join(draw.choices(vocabulary, k=100)) for _ in range(5000))
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    data = f"data={{source: {{kind: text, paths: corpus.txt, document: line}}, folder: {tmp_path / 'data'}, "
    data += "tokenizer: {kind: sentencepiece, model: unigram, vocabulary: 8000}}"
    argv = [sys.executable, "-m", "xscale", *words, str(ROOT / "configs/run/quickstart.yaml"), data]
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    process = subprocess.Popen(
        [*argv, f"run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    before = []
    for line in process.stderr:
        before.append(line)
        if "training the tokenizer (sentencepiece) on 3." in line:
            break
    else:
        pytest.fail("".join(before))
    wait_until_in_library(process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(600)
    said = process.stderr.read()
    assert process.returncode == (75 if words == ["train"] else 130), said
    assert "Traceback" not in said, said
    assert not list(tmp_path.glob("data/*/tokenizer.model"))
    assert ("before the first step" in said) == (words == ["train"])


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Tests that `nohup` starts would ignore a closed terminal, as it asks its programs to."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


STOPS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
"""Every signal by which a user, a terminal, a quota or a cluster asks a process to end."""


@pytest.mark.parametrize("name", STOPS)
def test_a_signal_in_training_is_a_wish_to_stop(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopSignal(speaks=False) as stop:
        stop.training_begins()
        os.kill(os.getpid(), number)
        assert stop.cause == name
        assert stop.seconds > 0
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", STOPS)
def test_a_signal_before_training_ends_the_process(name: str) -> None:
    with StopSignal(speaks=False) as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.Signals[name])
    assert stop.cause == name


PAIRS = {
    "the warning and the end of a job": ("SIGUSR1", "SIGTERM"),
    "the end twice": ("SIGTERM", "SIGTERM"),
    "a soft limit each second": ("SIGXCPU", "SIGXCPU"),
    "a closed terminal after Ctrl-C": ("SIGINT", "SIGHUP"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_first_of_two_signals_is_the_cause(case: str) -> None:
    first, second = PAIRS[case]
    with StopSignal(speaks=False) as stop:
        stop.training_begins()
        os.kill(os.getpid(), signal.Signals[first])
        os.kill(os.getpid(), signal.Signals[second])
    assert stop.cause == first


def test_a_run_of_nohup_goes_on_when_its_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(speaks=False) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.cause is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
