"""JSON that the launcher reads, damaged and hostile: another answer, a sentence, or no entry; never a traceback."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from xscale_launch import attempts, doctor, profile, status
from xscale_launch.main import main
from xscale_launch.nodes import links, node_check, preflight
from xscale_launch.plans import plan_cache, plan_query
from xscale_launch.slurm.job import SubmittedJob, submitted_jobs
from xscale_launch.slurm.watch import RunProgress, progress
from xscale_launch.status import LaunchError
from xscale_launch.typed_json import decode_json

VALUES: tuple[Any, ...] = (None, True, -1, 10**30, 3.5, "", "three", "a\nb", [], [[1]], {}, {"a": {"b": []}})
"""Values that a field is changed to; strings that are not Unicode and more are below."""
RAW: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"step": 3, "lo',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "NUL": b"\0" * 64,
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a number of many digits": b"[" + b"9" * 10_000 + b"]",
    "half a surrogate": b'{"id": "\\ud800", "script": "\\udfff", "step": 1, "loss": 1}',
    "a NUL in a text": b'{"id": "7\\u0000", "script": "a", "gigabytes_per_second": [["a\\u0000", "b", 1]]}',
    "infinite": b'{"step": Infinity, "loss": -Infinity, "when": NaN, "files": {}, "answer": {}}',
    "a scalar": b"7",
}


def paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in JSON data."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from paths(value, (*at, key))


def damaged(good: Any) -> Iterator[bytes]:
    """The data with each of its values changed or left out, and what is no JSON at all."""
    yield from RAW.values()
    for place in paths(good):
        for value in (*VALUES, "LEFT OUT"):
            data = json.loads(json.dumps(good))
            above = data
            for key in place[:-1]:
                above = above[key]
            if not place:
                data = value
            elif value == "LEFT OUT":
                del above[place[-1]]
            else:
                above[place[-1]] = value
            yield json.dumps(data).encode()


ANSWER = {"config": "run:\n  seed: 0\n  dir: runs/x\n", "run_dir": "runs/x", "files": ["x.yaml"], "plugins": []}
PROBLEM = {"path": "parallel", "what": "it does not fit", "fix": "Take more."}


def cached(folder: Path, content: bytes) -> Any:
    (folder / "one.json").write_bytes(content)
    entry = plan_cache.load(folder, "one")
    if entry is not None and plan_query.is_answer(entry.answer):
        return f"{entry.seconds_ago:.0f}", plan_query.with_settings(entry.answer["config"], {"dir": "a/b", "seed": "3"})
    return None


def asked(folder: Path, content: bytes) -> Any:
    """`xscale plan` prints this."""
    (folder / "out").write_bytes(content)
    (plan,) = plan_query.query_plans(("sh", "-c", f"cat {folder / 'out'}"), folder / "x.yaml", [[]], 1, os.environ)
    return plan.problems, plan.run_dir, plan.below("a").config


def measured(folder: Path, content: bytes) -> Any:
    (folder / "links.json").write_bytes(content)
    results = links.read_results(folder)
    return links.summary(results), links.find_problems(results, 1.0)


def listed(folder: Path, content: bytes) -> Any:
    (folder / "launch").mkdir(exist_ok=True)
    (folder / "launch" / "jobs.jsonl").write_bytes(content)
    return submitted_jobs(folder)


def reached(folder: Path, content: bytes) -> Any:
    (folder / "metrics.jsonl").write_bytes(content)
    return f"{progress(folder).loss or 0:.3f}"


def recorded(folder: Path, content: bytes) -> Any:
    (folder / "fault").write_bytes(content)
    first = attempts.read_attempt(folder, 1, 0)
    (folder / "fault").rename(folder / "ended-0")
    return status.describe(first[0]), attempts.read_attempt(folder, 1, 0)


READERS: dict[str, tuple[Any, Callable[[Path, bytes], Any]]] = {
    "plan cache": ({"when": 1.0, "files": {"x.yaml": ""}, "answer": ANSWER}, cached),
    "plan": ({**ANSWER, "problems": [PROBLEM]}, asked),
    "links": ({"gigabytes_per_second": [["n1", "n2", 10.0], ["n1", "n3", 9]]}, measured),
    "jobs": ({"id": "7", "script": "job.sbatch"}, listed),
    "metrics": ({"step": 3, "loss": 2.5}, reached),
    "attempt status": (75, recorded),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_damaged_is_a_sentence_or_not_there(reader: str, tmp_path: Path) -> None:
    good, read = READERS[reader]
    assert read(tmp_path, json.dumps(good).encode()), "the control: this is what is written"
    refused = 0
    contents = list(damaged(good))
    for content in contents if reader != "plan" else contents[: len(RAW)] + contents[len(RAW) :: 7]:
        try:
            read(tmp_path, content)
        except LaunchError as error:
            refused += 1
            str(error).encode()
    assert refused or reader in ("plan cache", "metrics", "attempt status")


@pytest.mark.parametrize("special", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(special: str, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for file in ("one.json", "links.json", "metrics.jsonl", "launch/jobs.jsonl", "fault", "ended-0", "clusters.toml"):
        path = tmp_path / file
        if special == "pipe":
            os.mkfifo(path)
        elif special == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    assert plan_cache.load(tmp_path, "one") is None
    assert progress(tmp_path) == RunProgress(str(tmp_path))
    assert attempts.read_attempt(tmp_path, 1, 0)[0] == attempts.NO_REPORT
    for read in (
        lambda: links.read_results(tmp_path),
        lambda: submitted_jobs(tmp_path),
        lambda: profile.load(tmp_path / "clusters.toml", "a"),
    ):
        with pytest.raises(LaunchError):
            read()


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 2.5}\n{"step": 4, "loss": null}\n{"eval_loss": 2}\n')
    assert main(["status", str(tmp_path)]) == 0
    assert f"{tmp_path}: step 4, loss nan" in capsys.readouterr().out
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "over").write_text("done?")
    assert main(["status", str(tmp_path)]) == 2
    assert "over holds no exit status" in capsys.readouterr().err


def test_the_id_of_a_job_is_no_option(tmp_path: Path) -> None:
    assert listed(tmp_path, b'{"id": "7_1", "script": "a"}\n\n') == [SubmittedJob("7_1", "a")]
    for name in ("--user=root", "7 8", "", "7;8", "\u0667x"):
        with pytest.raises(LaunchError, match=r"jobs\.jsonl:1 is not a submitted job: .* remove that line"):
            listed(tmp_path, json.dumps({"id": name, "script": "a"}).encode())


@pytest.mark.parametrize("content", [b"[" * 700, b"\xff\xfe", b"a = " + b"[" * 3000])
@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_a_profile_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"clusters.{suffix}"
    path.write_bytes(content)
    with pytest.raises(LaunchError, match=rf"clusters\.{suffix}"):
        profile.load(path, "a")


def test_messages_of_the_node_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who say what is no report, and one who says nothing: the nodes that report are heard."""
    monkeypatch.setattr(node_check, "MESSAGE_SECONDS", 0.2)
    monkeypatch.setattr(node_check, "MESSAGE_BYTES", 1000)
    good = {**preflight.as_data(preflight.NodeFacts("n2", packages={"torch": "2"}, gpus=[{"name": "a"}])), "task": 1}
    messages = [*RAW.values(), b"x" * 5000]
    for name in good:
        messages += [json.dumps({**good, name: value}).encode() for value in ({"a": 1}, [1])]
    port, received, answers = free_ports(), list[Any](), list[list[str]]()

    def judge(reports: Any) -> list[str]:
        received.extend(reports)
        return ["heard"]

    def connect() -> socket.socket:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port), timeout=20)

    head = threading.Thread(
        target=lambda: answers.append(node_check.serve(port, {"node": "n1"}, 2, 20.0, judge, host="127.0.0.1"))
    )
    head.start()
    for message in messages:
        with contextlib.suppress(ConnectionError), connect() as line:
            line.sendall(message + b"\n")
    with connect():
        answers.append(node_check.send_report("127.0.0.1", port, good, 20))
    head.join(60)
    assert answers == [["heard"]] * 2
    assert {report["node"] for report in received} == {"n1", "n2"}


def test_an_answer_of_the_head_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in (b'{"a": 1}\n', b"[1]\n", b"[" * 5000 + b"\n", b'["fine"]\n'):
                line, _ = server.accept()
                with line:
                    line.recv(1 << 16)
                    line.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert node_check.send_report("127.0.0.1", server.getsockname()[1], {"node": "n2"}, 20) == ["fine"]
        thread.join(20)


def test_a_mistake_of_the_doctor_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "environment", lambda: {"SLURM_PROCID": "x"})
    assert doctor.main(["--task"]) == status.USER_MISTAKE
    assert "SLURM_PROCID is 'x', expected an integer" in capsys.readouterr().err


@dataclass(frozen=True)
class Shape:
    count: int
    rate: float
    name: str = "default"
    pairs: list[tuple[str, int]] | None = None


def test_json_is_decoded_as_its_type() -> None:
    content = '{"count": 3, "rate": 2, "pairs": [["a", 1]], "other": {}}'
    decoded = decode_json(content, Shape)
    assert decoded == Shape(3, 2.0, "default", [("a", 1)])
    assert type(decoded.rate) is float
    for bad, clause in {
        "{": "it is not JSON",
        '{"count": 3}': "it lacks 'rate'",
        '{"count": true, "rate": 1}': "it.count is not an integer",
        '{"count": 3, "rate": "1"}': "it.rate is not a number",
        f'{{"count": {2**63}, "rate": 1}}': "it.count is not an integer",
        f'{{"count": 3, "rate": {10**400}}}': "it.rate is not a number",
        '{"count": 3, "rate": 1, "pairs": [["a", 1], ["a"]]}': r"it.pairs\[1\] is not a list of 2",
        '{"count": 3, "rate": 1, "name": "\\ud800"}': "it.name has a character that no text has",
    }.items():
        with pytest.raises(ValueError, match=clause):
            decode_json(bad, Shape)
