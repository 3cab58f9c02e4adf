"""A stand-in for the trainer as a launcher sees it: environment, signals, run folder and exit statuses.

`python fake_train.py CONFIG [key=value ...]`. Keys: run.dir, train.steps, and under fake.: step_seconds,
mistake, crash_at, crash_rank, kill_self (a signal's number instead of an exception), once (crash in the first
attempt only), ignore_signals. Its state is a number drawn on from step to step, so that a resumed run is bitwise
equal to one that never stopped, or is not.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

DEFAULTS = {"run.dir": "run", "train.steps": "5", "fake.step_seconds": "0.02"}


def settings(config: Path, overrides: list[str]) -> dict[str, str]:
    """Lines `key: value` of the config with the overrides over them."""
    lines = [
        line.partition(":") for line in config.read_text().splitlines() if ":" in line and not line.startswith("#")
    ]
    values = DEFAULTS | {key.strip(): value.strip() for key, _, value in lines}
    return values | dict(text.split("=", 1) for text in overrides)


def meet(rank: int, size: int, run: Path) -> None:
    """Every rank reports to rank 0 and leaves when all have: a wrong address or world size hangs, as it does."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(("", address[1])) as server:
            server.settimeout(60)
            peers = [server.accept()[0] for _ in range(size - 1)]
            ranks = {0, *(int(peer.recv(64)) for peer in peers)}
            assert ranks == set(range(size)), f"ranks {sorted(ranks)} met in a world of {size}"
            for peer in peers:
                peer.sendall(b"go")
                peer.close()
        return
    for _ in range(600):
        try:
            with socket.create_connection(address, timeout=60) as connection:
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


def main() -> int:
    """Trains, saves after each step, stops where it is asked to."""
    values = settings(Path(sys.argv[1]), sys.argv[2:])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "fake.mistake" in values:
        print(f"config: unknown key {values['fake.mistake']!r}", file=sys.stderr)
        return 2
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if "fake.ignore_signals" in values else lambda n, _: asked.append(n))
    run = Path(values["run.dir"])
    saved = run / "checkpoints" / f"rank-{rank}.json"
    saved.parent.mkdir(parents=True, exist_ok=True)
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
        if asked:
            print(f"rank {rank} saved at step {step} and stops", flush=True)
            return 75
    print(f"rank {rank} done at step {step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
