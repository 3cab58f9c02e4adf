"""Reports of the loop to its observers: frozen plain values, never the trainer."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy

Statistic = float | list[float]
"""A statistic from inside the model: one number, or one for each expert."""


@dataclass(frozen=True)
class RunFacts:
    """Facts known before the first step."""

    folder: Path
    """The run folder."""
    config: Mapping[str, Any]
    """The resolved config as plain data."""
    resumed_from: int | None
    """The step of the checkpoint that this process resumes from; None: a fresh run."""
    first_step: int
    """The first step that this process takes; the first of a run is 1."""
    last_step: int
    """The step at which the run is done."""
    parameters: int
    """Parameters of the whole model, on all devices."""
    active_parameters: int
    """Parameters that one token activates."""
    flops_per_token: float
    """FLOPs of forward and backward for one token."""
    tokens_per_step: int
    devices: int
    """Processes that train."""
    device: str
    """Name of the device of each process."""
    layouts: "Mapping[str, numpy.ndarray]" = field(default_factory=dict)
    """Attention layout of each layer by module path: bool [H, Q, K] over blocks, true where attention is computed."""
    notes: tuple[str, ...] = ()
    """Sentences for the log and the report, such as the model's summary."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software by name, see `versions`."""
    command: str = ""
    """The command line of this process."""
    host: str = ""
    """Name of the machine of rank 0."""
    commit: str = ""
    """Commit of xscale's source folder, see `source_commit`; empty: it is installed without one."""
    started: float | None = None
    """When the run began, in seconds since 1970."""
    repeats: tuple[str, ...] = ()
    """Work after the step `resumed_from` that a stop signal cut short and this process repeats, by name."""
    trained_parameters: int | None = None
    """Parameters that the optimizer changes, as with adapters or frozen ones; None: all of them."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Sizes of the data in words, by what they are of: tokens, documents, epochs."""


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step."""

    step: int
    loss: float
    """Mean over the step's tokens, in nats."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Consumed since the run began, over all processes and restarts."""
    seconds: float
    """Since this process began."""
    step_seconds: float
    tokens_per_second: float
    """Over all processes."""
    mfu: float | None = None
    """Model FLOPs utilisation, a fraction; None where the device's peak is not known."""
    split: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by phase: data, forward, backward, communicate, optimizer."""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    """By `<module path>/<name>`; `load` [E] is the fraction of the tokens of each expert, `dropped` a fraction,
    `overload` the rows of the busiest expert-parallel rank over the mean. Empty at steps that are not logged."""
    skipped: int = 0
    """Steps skipped so far, as their loss spiked or something was not finite."""
    loss_scale: float | None = None
    """Scale of the loss in backward (float16); None: it is not scaled."""


@dataclass(frozen=True)
class EvalReport:
    """One pass over the validation data."""

    step: int
    eval_loss: float
    """Mean over tokens, in nats."""
    perplexity: float
    """nan of labels."""
    bits_per_byte: float | None
    """None or nan where the objective does not predict every byte of the text."""
    seconds: float
    """Duration of the pass."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of an objective on labels, such as accuracy, by name."""
    ema_eval_loss: float | None = None
    """Loss of the moving average of the weights; None where there is none."""


@dataclass(frozen=True)
class TaskReport:
    """One evaluation of tasks of lm_eval."""

    step: int
    results: Mapping[str, float]
    """By `<task>/<metric>`; standard errors as `<task>/<metric>_stderr`."""
    seconds: float
    """Duration of the evaluation."""


@dataclass(frozen=True)
class SampleReport:
    """Text that the model generated."""

    step: int
    prompt: str
    text: str
    """The continuation of the prompt."""


@dataclass(frozen=True)
class EndReport:
    """The end of the loop of this process."""

    step: int
    """The last step."""
    reason: Literal["done", "stopped", "failed"]
    message: str = ""
    """The reason in a sentence."""
    baseline_bits_per_byte: float | None = None
    """Bits per byte of an order-2 byte model on the same validation text."""
    best_bits_per_byte: float | None = None
    best_step: int | None = None
    ended: float | None = None
    """When the loop ended, in seconds since 1970."""
    peak_memory: int | None = None
    """Most bytes that rank 0 allocated on its GPU; on a CPU, that its process had resident."""


PACKAGES = (
    "xscale",
    "torch",
    "numpy",
    "triton",
    "sentencepiece",
    "pydantic",
    "deepspeed",
    "megatron-core",
    "apex",
)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, the system, and those of `packages` that are installed, by name; imports none of them."""
    known = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in packages:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def source_commit() -> str:
    """Abbreviated commit of the folder with xscale's source, with `-dirty` after changes; empty where it has none."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
