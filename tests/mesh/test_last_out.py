"""The process that holds the store of the ranks leaves last, however the ranks were started and whichever is slow."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
SLOW = """
import os, sys, time
import xscale.mesh.collectives as collectives
import xscale.mesh.consensus as consensus

def late(function, seconds):
    def call(*given, **named):
        time.sleep(seconds if os.environ["RANK"] == os.environ["SLOW"] else 0)
        return function(*given, **named)
    return call

def slow_down():
    # The last use of the store, and the last collective, of a save, of an evaluation and of a preparation.
    if os.environ["LAST"] == "start":
        time.sleep(1.0 if os.environ["RANK"] == os.environ["SLOW"] else 0)
    elif os.environ["LAST"] == "store":
        # For longer than the other rank takes to end.
        collectives.SharedCounter.add = late(collectives.SharedCounter.add, 5.0)
    else:
        consensus.Consensus._values = late(consensus.Consensus._values, 0.5)

def end_by(how):
    import signal
    from xscale.train.after_step.step_reporter import StepReporter
    report = StepReporter.report
    def reported(self, *given):
        report(self, *given)
        if how == "failed":
            raise ValueError("a fault of the test's")
        if self.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    StepReporter.report = reported

def start():
    from xscale.cli.main import main
    from xscale.cli.terminal.options import rank_from_launcher
    rank_from_launcher()
    slow_down()
    if os.environ["HOW"] != "done":
        end_by(os.environ["HOW"])
    main()

def fork():
    # Read a line of processes to start; fork them, wait for them, and print their statuses. True in such a process.
    import gc, json
    import torch._dynamo, xscale.cli.main, xscale.commands.show.override_notes, xscale.evaluate.evaluate_run
    import xscale.train.run
    gc.collect()
    gc.freeze()  # A collection in a process that was forked would copy all that was imported.
    for line in sys.stdin:
        pids = []
        for process in json.loads(line):
            if not (pid := os.fork()):
                os.environ.clear()
                os.environ.update(process["environment"])
                os.chdir(process["folder"])
                output = os.open(process["output"], os.O_WRONLY | os.O_CREAT)
                for source, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
                    os.dup2(source, stream)
                sys.argv[1:] = process["words"]
                return True
            pids.append(pid)
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    return False

if __name__ == "__main__":
    if sys.argv[1:] != ["--fork"] or fork():
        start()
"""
"""A command line on which one rank is slow at its end, and that ends as the environment says.

Nearly all of a short command's time is the imports. With `--fork` a process imports once and forks the ranks that it is
given on standard input; they end as any process of Python's does.
"""
CONFIG = """
run: {dir: run, device: cpu}
model:
  kind: decoder
  width: 16
  stack: {depth: 1, block: {mixer: {kind: attention, heads: 2}, ffn: {kind: gated, hidden: 16}}}
objective: {kind: causal}
data:
  source: {kind: text, paths: [a.txt], document: line}
  tokenizer: {kind: byte}
  folder: data
  sequence_length: 16
  validation: 0.3
train: {steps: 3, batch_size: 2, micro_batch_size: 1, eval_every: 0, baseline: false}
schedule: {kind: cosine, warmup_steps: 1}
observe: {progress: false, tensorboard: false, report: false}
"""
COMMANDS = {
    "train": ("train", "c.yaml"),
    "prepare": ("data", "prepare", "c.yaml"),
    "eval": ("eval", "run"),
    "convert": ("checkpoint", "consolidate", "run", "run.safetensors"),
}
LIMIT = 600.0
"""Seconds after which a command counts as hanging."""
STATUS = {"done": 0, "stopped": 75, "failed": 1}
HOW = {"train": tuple(STATUS), "prepare": ("done",), "eval": ("done",), "convert": ("done",)}
"""Command -> the ends that it can have."""
LAST = {"convert": ("start",)}
"""Command -> where a rank is slow. A conversion has no store: it is rank 0's alone, and the others end at once."""


def launcher_variables(launcher: str, rank: int, port: int) -> dict[str, str]:
    """Variables that srun, or mpirun with mpi4py, gives one of two ranks of this machine."""
    if launcher == "srun":
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
        task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "2"}
        return {**step, **task, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(port)}
    ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in ranks.items()}}


class Starter:
    """Starts a command on two ranks: itself, as srun and mpirun do, or by a program that starts them."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "slow.py"
        self.program.write_text(SLOW)
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
        known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
        self.environment = {**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.forks: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self.forks is not None:
            os.killpg(self.forks.pid, signal.SIGKILL)
            self.forks.communicate()

    def statuses(
        self, folder: Path, launcher: str, words: tuple[str, ...], **environment: str
    ) -> tuple[list[int], str]:
        """Run a command in `folder`; return the status of each process that was started, and what they printed."""
        port = free_ports(2)
        base = {**self.environment, **environment}
        if launcher in ("srun", "mpirun"):
            variables = [{**base, **launcher_variables(launcher, rank, port)} for rank in (0, 1)]
            return self._forked(folder, words, variables)
        if launcher == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
            argv = [*torchrun, str(self.program), *words]
        else:
            local = [sys.executable, "-m", "xscale_launch", "local", "--processes=2", f"--port={port}"]
            argv = [*local, f"--xscale={sys.executable} {self.program}", *words[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(argv, env=base, cwd=folder, text=True, timeout=LIMIT, **pipes)  # type: ignore[call-overload]
        return [done.returncode], done.stdout

    def _forked(self, folder: Path, words: tuple[str, ...], variables: list[dict[str, str]]) -> tuple[list[int], str]:
        if self.forks is None:
            argv = [sys.executable, str(self.program), "--fork"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
            self.forks = subprocess.Popen(argv, env=self.environment, text=True, **pipes)  # type: ignore[call-overload]
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        outputs = [folder / f"output-{rank}.txt" for rank in range(len(variables))]
        processes = [
            {"environment": own, "folder": str(folder), "output": str(output), "words": words}
            for own, output in zip(variables, outputs, strict=True)
        ]
        self.forks.stdin.write(json.dumps(processes) + "\n")
        self.forks.stdin.flush()
        ended, _, _ = select.select([self.forks.stdout], [], [], LIMIT)
        assert ended, [output.read_text() for output in outputs]
        return json.loads(self.forks.stdout.readline()), "".join(output.read_text() for output in outputs)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("program"))
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Path:
    """The folder of a run that two ranks trained."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    assert starter.statuses(folder, "mpirun", COMMANDS["train"], SLOW="none", LAST="store", HOW="done")[0] == [0, 0]
    return folder


def write_inputs(folder: Path) -> None:
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "a.txt").write_text("".join(f"line {number} of a text that is long enough\n" for number in range(60)))


CASES = [
    f"{command}-{launcher}-{how}-{slow}-{last}"
    for command, hows in HOW.items()
    for launcher in ("srun", "mpirun", "torchrun", "launch")
    for how in hows
    for slow in ("0", "1")
    for last in LAST.get(command, ("store", "collective"))
    if command == "train" or launcher != "launch"  # which starts trainings only
]
QUICK = ("train-srun-done-1-store",)
LONG = (
    "train-mpirun-stopped-1-collective",
    "train-srun-failed-1-store",
    "prepare-mpirun-done-1-collective",
    "eval-srun-done-1-collective",
    "convert-srun-done-0-start",
    "convert-torchrun-done-1-start",
)


def marks_of(case: str) -> pytest.MarkDecorator | tuple[()]:
    if case in QUICK:
        return ()
    return pytest.mark.long if case in LONG else pytest.mark.nightly


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in CASES])
def test_every_rank_has_the_right_status(
    tmp_path: Path, request: pytest.FixtureRequest, starter: Starter, case: str
) -> None:
    command, launcher, how, slow, last = case.split("-")
    write_inputs(tmp_path)
    if command in ("eval", "convert"):
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    ended, said = starter.statuses(tmp_path, launcher, COMMANDS[command], SLOW=slow, LAST=last, HOW=how)
    # torchrun has a status of its own for a worker that did not end with 0.
    wanted = 1 if launcher == "torchrun" and how != "done" else STATUS[how]
    assert set(ended) == {wanted}, said
    if how != "failed":
        assert not (tmp_path / "run" / "faults").exists(), said
        assert "Traceback" not in said or launcher == "torchrun", said
    if command == "convert":
        assert (tmp_path / "run.safetensors").exists()
        assert said.count("SHA-256") == 1, said
    if command == "train" and how != "failed":
        assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1, said
