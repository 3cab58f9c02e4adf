"""The process that holds the store of the ranks leaves last, however the ranks were started and whichever is slow."""

import os
import subprocess
import sys
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
    if os.environ["LAST"] == "store":
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

if __name__ == "__main__":
    from xscale.cli.main import main
    from xscale.cli.options import rank_from_launcher
    rank_from_launcher()
    slow_down()
    if os.environ["HOW"] != "done":
        end_by(os.environ["HOW"])
    main()
"""
"""A command line on which one rank is slow at its end, and that ends as the environment says."""
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
COMMANDS = {"train": ("train", "c.yaml"), "prepare": ("data", "prepare", "c.yaml"), "eval": ("eval", "run")}
STATUS = {"done": 0, "stopped": 75, "failed": 1}
HOW = {"train": tuple(STATUS), "prepare": ("done",), "eval": ("done",)}
"""Command -> the ends that it can have. A conversion is one process, which has no store."""


def launcher_variables(launcher: str, rank: int, port: int) -> dict[str, str]:
    """Variables that srun, or mpirun with mpi4py, gives one of two ranks of this machine."""
    if launcher == "srun":
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
        task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "2"}
        return {**step, **task, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(port)}
    ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in ranks.items()}}


def statuses(folder: Path, launcher: str, words: tuple[str, ...], **environment: str) -> tuple[list[int], str]:
    """Run a command on two ranks; return the status of each process that was started, and what they printed."""
    program, port = str(folder / "slow.py"), free_ports(2)
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    base = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    base |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    own = [sys.executable, program]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        starts = [([*torchrun, program, *words], base)]
    elif launcher == "launch":
        local = [sys.executable, "-m", "xscale_launch", "local", "--processes=2", f"--port={port}"]
        starts = [([*local, f"--xscale={sys.executable} {program}", *words[1:]], base)]
    else:
        starts = [([*own, *words], {**base, **launcher_variables(launcher, rank, port)}) for rank in (0, 1)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen(argv, env=env, cwd=folder, text=True, **pipes) for argv, env in starts]  # type: ignore[call-overload]
    said = "".join(process.communicate(timeout=600)[0] for process in processes)
    return [process.returncode for process in processes], said


CASES = [
    f"{command}-{launcher}-{how}-{slow}-{last}"
    for command, hows in HOW.items()
    for launcher in ("srun", "mpirun", "torchrun", "launch")
    for how in hows
    for slow in ("0", "1")
    for last in ("store", "collective")
    if command == "train" or launcher != "launch"  # which starts trainings only
]
QUICK = ("train-srun-done-1-store",)
LONG = (
    "train-mpirun-stopped-1-collective",
    "train-srun-failed-1-store",
    "prepare-mpirun-done-1-collective",
    "eval-srun-done-1-collective",
)


def marks_of(case: str) -> pytest.MarkDecorator | tuple[()]:
    if case in QUICK:
        return ()
    return pytest.mark.long if case in LONG else pytest.mark.nightly


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in CASES])
def test_every_rank_has_the_right_status(tmp_path: Path, case: str) -> None:
    command, launcher, how, slow, last = case.split("-")
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "a.txt").write_text("".join(f"line {number} of a text that is long enough\n" for number in range(60)))
    if command == "eval":
        quick = {"SLOW": "none", "LAST": "store", "HOW": "done"}
        assert statuses(tmp_path, "mpirun", COMMANDS["train"], **quick)[0] == [0, 0]
    ended, said = statuses(tmp_path, launcher, COMMANDS[command], SLOW=slow, LAST=last, HOW=how)
    # torchrun has a status of its own for a worker that did not end with 0.
    wanted = 1 if launcher == "torchrun" and how != "done" else STATUS[how]
    assert set(ended) == {wanted}, said
    if how != "failed":
        assert not (tmp_path / "run" / "faults").exists(), said
        assert "Traceback" not in said or launcher == "torchrun", said
    if command == "train" and how != "failed":
        assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1, said
