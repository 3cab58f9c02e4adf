"""A plan as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from xscale.core.errors import counted

GIGABYTE = 1e9
NEGLIGIBLE = 1000
"""Bytes of a step below which traffic is not printed, such as all-reduces of scalars."""


def format_plan(plan: Mapping[str, Any]) -> list[str]:
    """Format a plan as lines of text."""
    over = {
        axis: degree
        for axis, degree in plan["degrees"].items()
        if type(degree) is int and degree > 1
    }
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in over.items())
    active = plan["active_parameters"]
    micro_batches = _micro_batches(plan["micro_batches_per_rank"])
    text = [
        f"model      {plan['parameters']:,} parameters, {active:,} active (vocabulary {plan['vocabulary']})",
        f"compute    {plan['flops_per_token'] / 1e6:,.1f} MFLOP per token, forward and backward",
        f"layout     {counted(plan['world'], 'rank')}: {degrees or 'one process'}",
        f"step       {plan['tokens_per_step']:,} tokens, {micro_batches} per rank",
    ]
    text += _overload(plan)
    if plan["pipeline"] is not None:
        stages = plan["pipeline"]
        shares = ", ".join(f"{share:.0%}" for share in stages["cost_shares"])
        text.append(
            f"pipeline   {stages['schedule']}, stages of {stages['blocks']} blocks ({shares} of the work)"
        )
        text.append(f"bubble     {stages['bubble']:.1%} of the ranks' time\n{stages['drawing']}")
    text += _context(plan["context_styles"])
    if plan["unknown"] is not None:
        text.append(f"memory     unknown: {plan['unknown']}")
        return [*text, *_model_states(plan), *_problems(plan["problems"])]
    return [
        *text,
        *_memory(plan),
        *_traffic(plan["traffic"]),
        *_speed(plan),
        *_problems(plan["problems"]),
    ]


def _overload(plan: Mapping[str, Any]) -> list[str]:
    """Say how many rows the busiest expert-parallel rank gets, if a factor was given."""
    factor, source = plan["overload"]["factor"], plan["overload"]["source"]
    if source is None:
        return []
    ranks = counted(plan["degrees"]["ep"], "expert-parallel rank")
    rows = f"{factor:.2f}x the mean rows, or what the capacity of its experts admits"
    return [f"experts    the busiest of {ranks} gets {rows} ({source})"]


def _context(styles: Mapping[str, Sequence[str]]) -> list[str]:
    """Say how modules see the other shards of the sequence, and which see all of it."""
    if not styles:
        return []
    counts = ", ".join(f"{style} in {len(paths)}" for style, paths in styles.items())
    text = [
        f"context    {counts} of {sum(map(len, styles.values()))} modules that read other shards"
    ]
    if gathered := styles.get("gather"):
        text.append(f"           gather, with the time and memory of cp=1: {', '.join(gathered)}")
    return text


def _memory(plan: Mapping[str, Any]) -> list[str]:
    memory, rank = plan["memory_bytes"], plan["parameters_per_rank"]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size / GIGABYTE:.3f}"
        for name, size in memory.items()
        if size and name != "total"
    )
    at = plan["memory_peak"]
    host = [
        f"host       {plan['memory_host_bytes'] / GIGABYTE:.3f} GB of offloaded activations in CPU memory"
    ]
    return [
        f"a rank     {rank['total']:,} parameters, {rank['active']:,} active",
        f"memory     {memory['total'] / GIGABYTE:.3f} GB at the peak, in {at['phase']} on rank {at['rank']}",
        f"           GB of {parts}",
        *(host if plan["memory_host_bytes"] else []),
    ]


def _model_states(plan: Mapping[str, Any]) -> list[str]:
    """Model state memory by formula, for a step that cannot be simulated."""
    states, offloaded = plan["memory_at_rest_bytes"], plan["memory_offloaded_bytes"]
    kinds = ", ".join(
        f"{kind} {size / GIGABYTE:.3f}" for kind, size in states.items() if kind != "total" and size
    )
    text = [
        f"states     {states['total'] / GIGABYTE:.3f} GB of model states on a rank's device: {kinds}"
    ]
    if offloaded is not None and any(offloaded.values()):
        cpu, nvme = (f"{offloaded[storage] / GIGABYTE:.3f} GB" for storage in ("cpu", "nvme"))
        text.append(f"offloaded  {cpu} of host memory and {nvme} of NVMe per rank")
    return [*text, "           by formula, without activations and gathered parameters"]


def _traffic(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    text = []
    for entry in entries:
        if entry["bytes"] < NEGLIGIBLE:
            continue
        overlap = "not overlapped" if entry["overlaps"] is None else f"overlaps {entry['overlaps']}"
        where = "within a node" if entry["node"] else "between nodes"
        size = f"{entry['bytes'] / GIGABYTE:.3g} GB a step"
        line = f"{entry['axis']:<10} {size}, {entry['messages']:,.0f} messages {where}"
        if entry["seconds"] is not None:
            line += f", {_time(entry['seconds'])}, {_time(entry['exposed'])} of it exposed"
        text.append(f"{line}; {overlap}")
    return text


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _speed(plan: Mapping[str, Any]) -> list[str]:
    if plan["device"] is None:
        return []
    device = plan["device"]
    fits = "fits into" if plan["fits"] else "DOES NOT FIT into"
    text = f"device     {device['name']}: {fits} {device['memory'] / GIGABYTE:.1f} GB"
    if plan["step_seconds"] is None:
        return [text]
    return [
        text,
        f"time       {_time(plan['step_seconds'])} a step: {_time(plan['compute_seconds'])} of compute, "
        f"{_time(plan['exposed_seconds'])} of exposed traffic, {plan['bubble']:.1%} bubble",
        f"speed      {plan['tokens_per_second']:,.0f} tokens/s, MFU {plan['mfu']:.1%} (predicted by rooflines)",
    ]


def _problems(entries: Sequence[Mapping[str, str]]) -> list[str]:
    return [f"problem    {entry['path']}: {entry['what']}. {entry['fix']}" for entry in entries]


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"
