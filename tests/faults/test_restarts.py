"""torchrun starts the workers again: one that was killed, from memory and without the disk; fewer, when a node goes."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.faults.dying import DIED
from tests.train.tiny import losses, recipe
from xscale.checkpoint.load import load_tensors, read_state
from xscale.core.config import encode

pytestmark = pytest.mark.long


ROOT = Path(__file__).parents[2]
STEPS, KILLED = 12, 8
PLUGIN = '''
"""Kills the process of one rank, or of a whole node, once, as step KILLED is counted; notes when steps are done."""
import os, signal, time
from pathlib import Path
from xscale.mesh.environment import read_rank_info
from xscale.train.after_step.step_reporter import StepReporter

FOLDER, STEP, RANK, NODE = Path({folder!r}), {step}, {rank}, {node}
before = StepReporter.report

def count(self, *given):
    before(self, *given)
    if read_rank_info().rank == 0:
        with open(FOLDER / "done", "a") as done:
            done.write(f"{{self.state.step}} {{time.time()}} {{read_rank_info().world}}\\n")
    mark = FOLDER / "killed"
    here = int(os.environ.get("STRUCK", "0")) if NODE else read_rank_info().rank
    if self.state.step == STEP and here == RANK and (NODE or not mark.exists()):
        mark.write_text(str(time.time()))
        os.kill(os.getppid(), signal.SIGKILL) if NODE else None
        os.kill(os.getpid(), signal.SIGKILL)

StepReporter.report = count
'''


def write(folder: Path, name: str, **sections: Any) -> Path:
    """The config of a run of STEPS steps."""
    train = {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "baseline": False}
    one = recipe(folder, name, **{"train": train, "parallel": {"mesh": {"ep": 2}}, **sections})
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(encode(one)))))
    return file


def plugin(folder: Path, **values: Any) -> None:
    given = {"folder": str(folder), "step": KILLED, "rank": 1, "node": False, **values}
    (folder / "struck_plugin.py").write_text(PLUGIN.format(**given))


def torchrun(folder: Path, *options: str, config: Path, **more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "xscale", "train", str(config)]
    paths = (str(folder), str(ROOT), str(ROOT / "kernels"), str(ROOT / "launch"))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        command, env=variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}")


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1])
def test_killed_and_started_again_from_memory(
    tmp_path: Path, quick_path: Path, rank: int, count_cases: Callable[[int, str], None]
) -> None:
    """kill -9 of one of two workers: on from a step that no disk has, equal to the run that was let be."""
    kept = {"every_steps": 4, "memory_every_steps": 1, "memory_folder": str(quick_path)}
    plugin(tmp_path, rank=rank)
    config = write(tmp_path, "struck", checkpoint=kept, plugins=["struck_plugin"])
    done = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=1", config=config)
    said, _ = done.communicate(timeout=600)
    assert done.returncode == 0, said
    log = (tmp_path / "struck" / "log.txt").read_text()
    # Of the step before the kill the copy may not have been whole yet; the disk has step 4.
    assert re.search(rf"resuming from the in-memory checkpoint of step ({KILLED - 1}|{KILLED - 2})\b", log), log
    struck = float((tmp_path / "killed").read_text())
    steps = [line.split() for line in (tmp_path / "done").read_text().splitlines()]
    seconds = min(float(at) for _, at, _ in steps if float(at) > struck + 0.5) - struck
    assert not list(quick_path.iterdir()), "what was kept in memory goes when the run is done"
    plain = write(tmp_path, "plain", checkpoint={"every_steps": 0}, plugins=["struck_plugin"])
    begun = time.time()
    left = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", config=plain)
    said, _ = left.communicate(timeout=600)
    assert left.returncode == 0, said
    steps = [line.split() for line in (tmp_path / "done").read_text().splitlines()]
    start = min(float(at) for _, at, _ in steps if float(at) > begun) - begun
    print(f"\nkill -9 of one of two workers to the next completed step: {seconds:.1f} s, of a new run: {start:.1f} s")
    assert losses(tmp_path, "struck") == losses(tmp_path, "plain")
    mine, other = weights(tmp_path, "struck"), weights(tmp_path, "plain")
    assert all(torch.equal(mine[name], other[name]) for name in other)
    count_cases(1, f"a worker killed, the run on from memory after {seconds:.1f} s")


def test_a_node_goes_and_fewer_ranks_go_on(tmp_path: Path, count_cases: Callable[[int, str], None]) -> None:
    """Two nodes of two ranks; one is lost with all that is on it; the other goes on alone, sample for sample."""
    plugin(tmp_path, rank=1, node=True)
    double = {"compute": "float64", "master": "float64"}
    sections = {"precision": double, "checkpoint": {"every_steps": 2}}
    config = write(tmp_path, "struck", plugins=["struck_plugin"], **sections)
    port = free_port()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", WAITS)
    options = (*rendezvous, "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2")
    nodes = [torchrun(tmp_path, *options, config=config)]
    # Whoever comes first holds the store of the rendezvous, and the node that is lost must not.
    wait_for_listener(port)
    nodes.append(torchrun(tmp_path, *options, config=config, STRUCK="1"))
    try:
        first, _ = nodes[0].communicate(timeout=600)
        second, _ = nodes[1].communicate(timeout=600)
    finally:
        for node in nodes:
            node.kill()
    assert sorted(node.returncode for node in nodes) == [DIED, 0], first + second
    worlds = {int(step): int(world) for step, _, world in map(str.split, (tmp_path / "done").read_text().splitlines())}
    assert [worlds[step] for step in (2, STEPS)] == [4, 2]
    alone = write(tmp_path, "alone", parallel={}, **sections)
    left = torchrun(tmp_path, "--standalone", "--nproc-per-node=1", config=alone)
    said, _ = left.communicate(timeout=600)
    assert left.returncode == 0, said
    assert torch.allclose(*(torch.tensor(losses(tmp_path, name)) for name in ("struck", "alone")), rtol=1e-9, atol=0)
    mine, other = weights(tmp_path, "struck"), weights(tmp_path, "alone")
    assert all((mine[name] - other[name]).abs().max() < 1e-9 for name in other)
    state = read_state(tmp_path / "struck" / "checkpoints" / f"step-{STEPS:08d}")
    assert state["consumed"] == 8 * STEPS
    count_cases(1, "a node lost, half of the ranks go on")


WAITS = "--rdzv-conf=last_call_timeout=20,join_timeout=300,timeout=300"
"""How long the first node waits for the second, which a busy machine starts late, and for a lost one to come back."""


def wait_for_listener(port: int, seconds: float = 300) -> None:
    """Return once something listens at the port of this machine."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < end, f"nothing listens at port {port}"
            time.sleep(0.1)


def free_port() -> int:

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
