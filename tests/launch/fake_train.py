"""A stand-in for the trainer as a launcher sees it: environment, signals, run folder and exit statuses.

`python fake_train.py train CONFIG [key=value ...]`, `--print-config`, and
`plan ... --world N --json --check | --memory GB`.
Keys: run.dir, train.steps, and under fake.: step_seconds, stop_after (steps, with + between), mistake, crash_at,
crash_rank, kill_self (a signal's number instead of an exception), once (crash in the first attempt only),
ignore_signals, divides, gigabytes. Its state is a number drawn on from step to step, so that a resumed run is bitwise
equal to one that never stopped, or is not.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from itertools import combinations
from pathlib import Path

from xscale_launch.hostlist import expand

DEFAULTS = {"run.dir": "run", "train.steps": "5", "fake.step_seconds": "0.02"}


def settings(config: Path, overrides: list[str]) -> dict[str, str]:
    """Lines `key: value` of the config with the overrides over them."""
    lines = [line.partition(":") for line in config.read_text().splitlines() if ":" in line and line[0] not in "# "]
    values = DEFAULTS | {key.strip(): value.strip() for key, _, value in lines}
    return values | dict(override.split("=", 1) for override in overrides)


def meet(rank: int, size: int, run: Path) -> None:
    """Every rank reports to rank 0 and leaves when all have: a wrong address or world size hangs, as it does."""
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens at MASTER_PORT
        port -= 10000  # no port of another job
    address = (os.environ["MASTER_ADDR"], port)
    if rank == 0:
        with socket.create_server(("", address[1])) as server:
            server.settimeout(600)
            peers = [server.accept()[0] for _ in range(size - 1)]
            ranks = {0, *(int(peer.recv(64)) for peer in peers)}
            assert ranks == set(range(size)), f"ranks {sorted(ranks)} met in a world of {size}"
            for peer in peers:
                peer.sendall(b"go")
                peer.close()
        return
    for _ in range(600):
        try:
            with socket.create_connection(address, timeout=600) as connection:
                connection.sendall(str(rank).encode())
                assert connection.recv(2) == b"go"
                return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(f"rank {rank} found nobody at {address}")


def fail(values: dict[str, str], rank: int, attempt_is_first: bool) -> None:
    """Ends the process in the way that the settings ask for."""
    if values.get("fake.crash_rank", "0") != str(rank) or ("fake.once" in values and not attempt_is_first):
        return
    if "fake.kill_self" in values:
        os.kill(os.getpid(), int(values["fake.kill_self"]))
        time.sleep(5)
    raise RuntimeError("the step fell over")


def plan(runs: list[dict[str, str]], processes: int, memory: float | None, several: bool) -> int:
    """Stands in for `xscale plan --json` for the launcher: it accepts, or refuses with a sentence."""
    for values in runs:
        if processes % int(values.get("fake.divides", "1")):
            print(f"parallel.mesh: {values['fake.divides']} does not divide {processes} processes", file=sys.stderr)
            return 2
    answers = [answer(values, processes, memory) for values in runs]
    print(json.dumps(answers if several else answers[0]))
    return 3 if answers[0]["problems"] and not several else 0


def answer(values: dict[str, str], processes: int, memory: float | None) -> dict[str, object]:
    """The answer for one run."""
    needed, problems = float(values.get("fake.gigabytes", "0")) / processes, []
    if memory is not None and needed > memory:
        what = f"rank 0 needs {needed:.2f} GB at its peak, and one GPU has {memory:.1f} GB"
        problems.append({"path": "parallel", "what": what, "fix": "Take more devices."})
    said = {"world": processes, "problems": problems, "run_dir": values["run.dir"], "files": []}
    return {**said, "plugins": [], "config": shown(values)}


def shown(values: dict[str, str]) -> str:
    """Output of `xscale train --print-config`: a config that this program reads, and the run folder."""
    run = f"run:  # default\n  seed: 0\n  dir: {values['run.dir']}   # command line\n"
    return run + "".join(f"{key}: {value}\n" for key, value in values.items() if key != "run.dir")


def links(out: Path) -> int:
    """Stands in for `xscale bench links`: 10 GB/s between each two nodes, 1 where FAKE_SLOW is one of them."""
    if os.environ["RANK"] == "0":
        nodes = expand(os.environ["SLURM_JOB_NODELIST"])
        slow = os.environ.get("FAKE_SLOW")
        pairs = [(one, other, 1.0 if slow in (one, other) else 10.0) for one, other in combinations(nodes, 2)]
        out.write_text(json.dumps({"gigabytes_per_second": pairs}))
    return int(os.environ.get("FAKE_LINKS_STATUS", "0"))


def main() -> int:
    """Trains, saves after each step, stops where it is asked to."""
    if sys.argv[1:3] == ["bench", "links"]:
        return links(Path(sys.argv[sys.argv.index("--out") + 1]))
    verb, config, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    values = settings(config, [text for text in rest if "=" in text])
    if verb == "plan":
        memory = float(rest[rest.index("--memory") + 1]) if "--memory" in rest else None
        assert (memory is None) == ("--check" in rest), rest
        several = "--members" in rest
        runs = (
            [values | dict(one.split("=", 1) for one in more) for more in json.load(sys.stdin)] if several else [values]
        )
        return plan(runs, int(rest[rest.index("--world") + 1]), memory, several)
    if "--print-config" in rest:
        print(shown(values), end="")
        return 0
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "fake.mistake" in values:
        print(f"config: unknown key {values['fake.mistake']!r}", file=sys.stderr)
        return 2
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if "fake.ignore_signals" in values else lambda n, _: asked.append(n))
    run = Path(values["run.dir"])
    saved = run / "state" / f"rank-{rank}.json"
    for folder in (saved.parent, run / "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
    first = not saved.exists()
    step, loss = (0, 1.0) if first else json.loads(saved.read_text())
    if rank == 0:
        (run / "config.yaml").write_text("\n".join(f"{key}: {value}" for key, value in values.items()) + "\n")
    meet(rank, size, run)
    print(f"rank {rank} of {size} starts at step {step} on {socket.gethostname()}", flush=True)
    while step < int(values["train.steps"]):
        if str(step) == values.get("fake.crash_at"):
            fail(values, rank, first)
        time.sleep(float(values["fake.step_seconds"]))
        step, loss = step + 1, loss * random.Random(step).random() + rank
        if rank == 0:
            with (run / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "loss": loss}) + "\n")
        written = saved.with_suffix(".part")
        written.write_text(json.dumps([step, loss]))
        written.replace(saved)
        if rank == 0:
            (run / "checkpoints" / f"step-{step:06}").touch()
        if asked or str(step) in values.get("fake.stop_after", "").split("+"):
            print(f"rank {rank} saved at step {step} and stops", flush=True)
            return 75
    print(f"rank {rank} done at step {step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
