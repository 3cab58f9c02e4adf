"""The jobs of `xscale bench gpu`, in the order of their worth: what each measures and what its figures decide.

Nothing here imports torch, so that the process which watches over the jobs starts at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xscale.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class GpuJob:
    """Cases that are measured one after another, within one time limit."""

    id: str
    """J1, J2 ..."""
    name: str
    """Its name for --only."""
    measures: str
    """Sentence: the figures that it leaves."""
    decides: str
    """Sentence: what is done for which figure."""
    seconds: float
    """Time limit; the time that is expected on an H100 where there is nothing to wait for."""
    module: str
    """Module whose `cases(context)` lists its cases."""


JOBS = (
    GpuJob(
        "J1",
        "correct",
        "The tests marked `gpu`, and two steps of every recipe with its sizes cut down: loss against the CPU's.",
        "No speed of a failing part is reported; each failure is mended before its job is run again.",
        420.0,
        "xscale.bench.gpu.cases.correct",
    ),
    GpuJob(
        "J2",
        "train",
        "Training steps of a dense model and of mixtures (8 experts top-2, 64 experts top-8; real and balanced "
        "routing) against plain PyTorch and transformers with torch.compile: tokens/s, MFU by both formulas, profile.",
        "Goals: dense MFU >= 55 %, coarse experts >= 47 %, fine >= 27 %, a mixture >= 0.90 of its dense twin. The "
        "profile names what is mended first.",
        420.0,
        "xscale.bench.gpu.cases.training",
    ),
    GpuJob(
        "J3",
        "packed",
        "Attention in packed documents: variable-length kernels against FlexAttention with and without its block "
        "mask, and against causal attention without documents.",
        "Whether models under torch.compile should attend by variable-length kernels: yes where they take less than "
        "0.8 of FlexAttention's time.",
        220.0,
        "xscale.bench.gpu.cases.packed",
    ),
    GpuJob(
        "J4",
        "operators",
        "Every fused operator against its definition, eager and under torch.compile, torch's own fused form, and the "
        "libraries that are installed (Liger, QuACK, fla, apex): time, memory, fraction of the device's ceiling.",
        "Which implementation an operator takes first; a kernel slower than torch.compile loses its place.",
        420.0,
        "xscale.bench.gpu.cases.operators",
    ),
    GpuJob(
        "J5",
        "attention",
        "Causal attention from 4k to 64k tokens by each backend of torch's SDPA (flash, cudnn, efficient), "
        "FlexAttention, flash-attn, block-sparse patterns and the cores of linear cost.",
        "The backend that the core softmax asks for on this device; from which length a sparse core is faster.",
        420.0,
        "xscale.bench.gpu.cases.attention",
    ),
    GpuJob(
        "J6",
        "float8",
        "Training steps of the dense model in bfloat16 and with each scaling of float8: tokens/s, MFU and memory.",
        "Whether float8 is worth its noise: it is where a step takes less than 0.9 of bfloat16's.",
        280.0,
        "xscale.bench.gpu.cases.float8",
    ),
    GpuJob(
        "J7",
        "checkpoint",
        "Step times through asynchronous saves: median and longest, against steps without a save.",
        "Goals: no step longer than 1.1 of the median, a stall below 1 s for 1.3 billion parameters with Adam.",
        230.0,
        "xscale.bench.gpu.cases.checkpoints",
    ),
    GpuJob(
        "J8",
        "decode",
        "Greedy decoding at batch 1 against transformers with the same weights: tokens/s over a growing KV cache, a "
        "static one by a CUDA graph of the step, and with that step compiled.",
        "Goal for GPT-2: >= 767 tokens/s on an H200. Whether `--compile` is worth its seconds beside the graph.",
        300.0,
        "xscale.bench.gpu.cases.decoding",
    ),
    GpuJob(
        "J9",
        "memory",
        "Predicted against measured peak memory of eight recipes, with recomputation, offload and float8.",
        "Goal: within 5 %. The term that is off is corrected in the model of memory.",
        240.0,
        "xscale.bench.gpu.cases.memory",
    ),
    GpuJob(
        "J10",
        "graphs",
        "Gradients of a micro-batch: eager, compiled, and either as a CUDA graph (`parallel.cuda_graphs`).",
        "Which recipes take `parallel.cuda_graphs`: those whose step gains 5 % or more.",
        150.0,
        "xscale.bench.gpu.cases.graphs",
    ),
    GpuJob(
        "J11",
        "evidence",
        "The headline figure of each goal once more, all on one device and one commit.",
        "The table of evidence in kernels/README.md; each gap to a goal is the next piece of work.",
        420.0,
        "xscale.bench.gpu.cases.evidence",
    ),
)


def choose_jobs(names: Sequence[str]) -> list[GpuJob]:
    """Return the jobs of these ids or names, in their order; all without a name. ConfigError for an unknown one."""
    known = {key: job for job in JOBS for key in (job.id.lower(), job.name)}
    if unknown := [name for name in names if name.lower() not in known]:
        raise ConfigError(
            "--only", f"there is no job '{unknown[0]}'", nearest(unknown[0], list(known))
        )
    chosen = {known[name.lower()].id for name in names}
    return [job for job in JOBS if not names or job.id in chosen]
