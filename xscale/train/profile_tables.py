"""Tables of a profile: the largest operators of a rank, and all ranks beside each other, the slowest first."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch.profiler import profile

from xscale.observe.format import percentage, quantity

LARGEST = 10
"""Operators, and ranks, in a table that is logged."""
STEP = re.compile(r"step \d+")
"""Names of the ranges that the steps are."""
COLLECTIVES = re.compile(r"(gloo|mpi|ucc):|nccl")
"""Beginnings of the names of what runs a collective: a range on a CPU, a kernel on a GPU."""


def operator_table(finished: profile, steps: int, *, on_gpu: bool) -> str:
    """The `LARGEST` operators by the time they take themselves, without what they call, and by FLOPs; of one step.

    Times are those of the device that computes: kernels on a GPU, operators on a CPU. There the row of a phase, such
    as `forward`, is the time between its operators, which Python takes.
    """
    seconds = dict[str, float]()
    calls = dict[str, float]()
    flops = dict[str, float]()
    for event in finished.key_averages():
        name = "step" if STEP.fullmatch(event.key) else event.key
        if event.flops:
            flops[name] = flops.get(name, 0.0) + event.flops / steps
        # A kernel has a row of its own beside that of the operator that starts it and those of the ranges around it.
        if on_gpu and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds[name] = seconds.get(name, 0.0) + microseconds / 1e6 / steps
        calls[name] = calls.get(name, 0.0) + event.count / steps
    total = sum(seconds.values()) or 1.0
    lines = [f"{'operator':48} {'ms a step':>10} {'of all':>8} {'calls':>8} {'FLOPs':>8}"]
    for name in sorted(seconds, key=lambda name: -seconds[name])[:LARGEST]:
        counted = quantity(flops[name]) if name in flops else "-"
        share = percentage(seconds[name] / total)
        lines.append(
            f"{name[:48]:48} {1e3 * seconds[name]:10.2f} {share:>8} {calls[name]:8.0f} {counted:>8}"
        )
    if on_gpu and not seconds:
        lines.append(
            "no kernel was recorded: start with KINETO_LOG_LEVEL=4 in the environment to see why"
        )
    if total_flops := sum(flops.values()):
        lines.append(
            f"FLOPs of a step: {quantity(total_flops)}, of products and convolutions that the profiler counts"
        )
        for name in sorted(flops, key=lambda name: -flops[name])[:LARGEST]:
            lines.append(f"{name[:48]:48} {percentage(flops[name] / total_flops):>10}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class RankProfile:
    """Work of one rank in a profiled step, in seconds."""

    rank: int
    host: str
    compute: float
    """In operators or kernels other than collectives."""
    collectives: float
    """In collectives, waits for other ranks included."""
    phases: Mapping[str, float]
    """Name of each phase -> seconds."""


def rank_profile(
    finished: profile,
    steps: int,
    rank: int,
    host: str,
    phases: Mapping[str, float],
    *,
    on_gpu: bool,
) -> RankProfile:
    """Sum up the profile of a rank; `phases` are the seconds of all `steps`.

    A collective on a GPU runs beside kernels, and one of gloo beside operators: the two sums are no parts of a step.
    """
    compute = collectives = 0.0
    for event in finished.key_averages():
        is_collective = COLLECTIVES.match(event.key) is not None
        if on_gpu:
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                compute += 0.0 if is_collective else event.self_device_time_total
                collectives += event.self_device_time_total if is_collective else 0.0
        elif is_collective:
            collectives += event.cpu_time_total
        elif not event.is_user_annotation:
            compute += event.self_cpu_time_total
    per_step = {name: seconds / steps for name, seconds in phases.items()}
    return RankProfile(rank, host, compute / 1e6 / steps, collectives / 1e6 / steps, per_step)


def rank_table(profiles: Sequence[RankProfile], limit: int | None = None) -> str:
    """A row for each rank, or the first `limit`, those that compute longest first.

    The other ranks wait in collectives for one that computes longer than they do.
    """
    names = list(dict.fromkeys(name for entry in profiles for name in entry.phases))
    widths = [max(9, len(name)) for name in names]
    host_width = max(4, *(len(entry.host) for entry in profiles))
    titles = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [
        f"{'rank':>6} {'host':{host_width}} {'computes':>9} {'x median':>9} {'collectives':>11} {titles}"
    ]
    middle = median(entry.compute for entry in profiles) or 1.0
    for entry in sorted(profiles, key=lambda entry: -entry.compute)[:limit]:
        phases = [entry.phases.get(name, 0.0) for name in names]
        cells = " ".join(
            f"{1e3 * seconds:{width}.2f}" for seconds, width in zip(phases, widths, strict=True)
        )
        head = f"{entry.rank:6} {entry.host:{host_width}} {1e3 * entry.compute:9.2f}"
        lines.append(
            f"{head} {entry.compute / middle:9.2f} {1e3 * entry.collectives:11.2f} {cells}"
        )
    return "\n".join(lines) + "\n"
