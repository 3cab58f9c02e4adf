"""`xscale bench moe`: runs the layer's tests, then times layers and their phases in alternating rounds."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xscale.bench.harness.machine import ROOT, describe_machine
from xscale.bench.harness.timing import alternate, clock_of
from xscale.bench.moe.layers import (
    TOLERANCE,
    LayerSizes,
    TimedLayer,
    as_function,
    dense_ffn,
    loop_over_experts,
    switch_moe,
    topk_moe,
    transformers_mixtral,
    transformers_switch,
)
from xscale.bench.torchrun import relaunch_under_torchrun, report_from_rank0
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.mesh import axes
from xscale.mesh.collectives import sum_scalars
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import init_mesh, leave_process_group
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.materialize import replace_parameters
from xscale.nn.module import substitute
from xscale.nn.tokens import Tokens
from xscale.parallel.expert import AllToAll, overload_factor
from xscale_kernels.permute.op import permute, unpermute

BALANCED = "xscale, balanced routing"
PHASES = ("route", "permute", "all-to-all", "GEMM", "unpermute")


def phase_steps(moe: Moe, x: Tensor) -> dict[str, Callable[[], object]]:
    """Forward and backward of each phase by itself, as functions without arguments; inputs come from earlier phases.

    Collective under expert parallelism: every rank must call them in the same order.
    """
    tokens = Tokens.from_ids(torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device))
    flat = x.flatten(0, 1)
    with torch.no_grad():
        plan, _ = moe.dispatch_plan(x, tokens)
        rows = permute(flat, plan.tokens)
        received: list[Tensor] = []

        def keep(local_rows: Tensor, tokens_per_expert: Tensor, _: Tensor | None) -> Tensor:
            received.extend((local_rows, tokens_per_expert))
            return local_rows

        moe.dispatch(rows, plan.tokens_per_expert, keep)
        outputs = moe.dispatch(rows, plan.tokens_per_expert, moe.experts)
    weights = plan.weights.detach()

    def route() -> object:
        leaf = x.detach().requires_grad_()
        routed, _ = moe.dispatch_plan(leaf, tokens)
        return _backward(routed.weights, [leaf, *moe.router.parameters()])

    def permute_rows() -> object:
        leaf = flat.detach().requires_grad_()
        return _backward(permute(leaf, plan.tokens), [leaf])

    def all_to_all() -> object:
        leaf = rows.detach().requires_grad_()
        return _backward(
            moe.dispatch(leaf, plan.tokens_per_expert, lambda rows, counts, keys: rows), [leaf]
        )

    def gemm() -> object:
        leaf = received[0].detach().requires_grad_()
        return _backward(moe.experts(leaf, received[1]), [leaf, *moe.experts.parameters()])

    def unpermute_rows() -> object:
        leaf, scale = outputs.detach().requires_grad_(), weights.detach().requires_grad_()
        return _backward(unpermute(leaf, plan.tokens, scale, len(flat)), [leaf, scale])

    return dict(zip(PHASES, (route, permute_rows, all_to_all, gemm, unpermute_rows), strict=True))


def _backward(out: Tensor, inputs: Sequence[Tensor]) -> object:
    return torch.autograd.grad(
        out, [tensor for tensor in inputs if tensor.requires_grad], torch.ones_like(out)
    )


def bench_moe(widths: Sequence[int], sizes: LayerSizes, rounds: int) -> dict[str, Any]:
    """Plain data: for each width the milliseconds of layers and phases, and ratios. Collective."""
    rank_info = read_rank_info()
    device = (
        torch.device("cuda", rank_info.local_rank)
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    mesh = init_mesh(
        rank_info, axes.resolve(axes.MeshConfig(ep=rank_info.world), rank_info.world), device, 300.0
    )
    group = None if mesh.experts is None else mesh.experts["ep"].get_group()
    try:
        results = [
            _bench_width(replace(sizes, width=width), rounds, device, group) for width in widths
        ]
    finally:
        leave_process_group()
    return {
        "sizes": results,
        "rounds": rounds,
        "processes": rank_info.world,
        "first": rank_info.is_rank0,
        **describe_machine(device),
    }


def _bench_width(
    sizes: LayerSizes, rounds: int, device: torch.device, group: Any
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(sizes.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    moe = topk_moe(sizes, device, dtype)
    dense = dense_ffn(sizes, device, dtype)
    layers = [
        TimedLayer(
            "dense of equal active FLOPs",
            as_function(dense, sizes, device),
            list(dense.parameters()),
        )
    ]
    if group is None:
        layers.append(
            TimedLayer(
                "loop over experts", loop_over_experts(moe), list(moe.parameters()), "xscale"
            )
        )
        layers += transformers_mixtral(moe, sizes)
    else:
        _shard_experts(moe, group)
    balanced = topk_moe(sizes, device, dtype, "round_robin")
    if group is not None:
        _shard_experts(balanced, group)
    balanced_layer = TimedLayer(
        BALANCED, as_function(balanced, sizes, device), list(balanced.parameters())
    )
    layers = [
        TimedLayer("xscale", as_function(moe, sizes, device), list(moe.parameters())),
        balanced_layer,
        *layers,
    ]
    if group is None:
        switch = switch_moe(sizes, device, dtype)
        if rivals := transformers_switch(switch, sizes):
            xscale_layer = TimedLayer(
                "xscale, switch", as_function(switch, sizes, device), list(switch.parameters())
            )
            layers += [xscale_layer, *rivals]
    _check_same_outputs(layers, x)
    times = median_milliseconds(
        {layer.name: forward_backward(layer, x) for layer in layers}, rounds, device
    )
    split = median_milliseconds(phase_steps(moe, x), rounds, device)
    if group is None:
        split.pop("all-to-all")
    ratios = {
        name: times[name] / times["xscale, switch" if name == "transformers Switch" else "xscale"]
        for name in times
        if name not in ("xscale", "xscale, switch")
    }
    overload = {
        "xscale": measure_overload(moe, x, group),
        BALANCED: measure_overload(balanced, x, group),
    }
    sections = {"milliseconds": times, "phases": split, "speed": ratios, "overload": overload}
    return {**asdict(sizes), "hidden": sizes.inner, **sections}


def measure_overload(moe: Moe, x: Tensor, group: Any) -> float:
    """Rows of the busiest rank over the mean over ranks; on one rank those of the busiest expert. Collective.

    The slowest rank sets the time of a layer, so that its step takes this factor longer than with balanced routing.
    """
    tokens = Tokens.from_ids(torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device))
    with torch.no_grad():
        counts = moe.dispatch_plan(x, tokens)[0].tokens_per_expert
    if group is None:
        return overload_factor(counts, len(counts))
    counts = torch.tensor(sum_scalars(counts.tolist(), x.device))
    return overload_factor(counts, group.size())


def _shard_experts(moe: Moe, group: Any) -> None:
    """Keep this rank's experts, and dispatch rows to all experts by all-to-all."""
    local = moe.config.experts // group.size()
    first = group.rank() * local
    replace_parameters(
        moe.experts,
        lambda name, old: torch.nn.Parameter(old.detach()[first : first + local].clone()),
    )
    substitute(moe, "dispatch", AllToAll(group))


def _check_same_outputs(layers: Sequence[TimedLayer], x: Tensor) -> None:
    """Raise ConfigError for a layer whose outputs differ from its reference's."""
    outputs = {layer.name: layer.forward(x).detach() for layer in layers}
    for layer in layers:
        if layer.reference:
            wanted = outputs[layer.reference]
            difference = float((outputs[layer.name] - wanted).abs().max() / wanted.abs().max())
            tolerance = TOLERANCE if x.dtype == torch.float32 else 0.05
            if not difference <= tolerance:
                what = f"outputs of {layer.name} and {layer.reference} differ by {difference:.2g}"
                raise ConfigError("bench moe", what)


def forward_backward(layer: TimedLayer, x: Tensor) -> Callable[[], object]:
    """A function that runs forward, and backward to the input and every weight."""

    def run() -> object:
        leaf = x.detach().requires_grad_()
        y = layer.forward(leaf)
        return torch.autograd.grad(y, [leaf, *layer.parameters], torch.ones_like(y))

    return run


def median_milliseconds(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each function over `rounds` alternating rounds, after a warm-up round."""
    timings = alternate(functions, clock_of(device), rounds)
    return {name: timings.median(name) * 1e3 for name in functions}


def format_table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [
        f"{results['device']}, {results['processes']} process{'es' if results['processes'] > 1 else ''}; "
        f"torch {results['torch']}, transformers {results['transformers']}, Python {results['python']}, "
        f"commit {results['commit']}, {results['date']}; medians of {results['rounds']} alternating rounds"
    ]
    for layer in results["sizes"]:
        lines.append(
            f"\nwidth {layer['width']}, {layer['experts']} experts of hidden {layer['hidden']}, top-{layer['top_k']}, "
            f"{layer['tokens']} tokens{' a process' if results['processes'] > 1 else ''}; forward + backward"
        )
        for name, milliseconds in layer["milliseconds"].items():
            ratio = layer["speed"].get(name)
            rival = "xscale, switch" if name == "transformers Switch" else "xscale"
            comparison = "" if ratio is None else f"   {rival} runs at {ratio:.2f}x of its speed"
            factor = layer["overload"].get(name)
            busiest = "rank" if results["processes"] > 1 else "expert"
            load = "" if factor is None else f"   busiest {busiest} {factor:.2f}x of the mean"
            lines.append(f"  {name:<34}{milliseconds:9.2f} ms{comparison}{load}")
        total = sum(layer["phases"].values())
        parts = "   ".join(
            f"{name} {value:.2f} ({value / total:.0%})" for name, value in layer["phases"].items()
        )
        lines.append(f"  phases, each by itself, ms: {parts}")
    return "\n".join(lines)


TESTS = (
    "tests/kernels/test_grouped_gemm.py",
    "tests/kernels/test_permute.py",
    "tests/nn/moe/test_transformers.py",
)


def bench(
    widths: Sequence[int],
    sizes: LayerSizes,
    rounds: int,
    processes: int,
    *,
    as_json: bool,
    record: Path | None,
) -> int:
    """Run the benchmark; returns the exit status. Raises ConfigError for invalid sizes, or if the tests fail."""
    rank_info = read_rank_info()
    problems = [
        problem
        for width in widths
        for problem in LayerSizes(width, *_without_width(sizes)).check(processes)
    ]
    if rounds < 1 or processes < 1:
        raise ConfigError(
            "--rounds" if rounds < 1 else "--processes", "must be at least 1", "Take 1 or more."
        )
    if problems:
        raise ConfigError(problems)
    if rank_info.is_single_process:
        require_passing_tests()
        if processes > 1:
            return relaunch_under_torchrun(processes)
    report_from_rank0(
        bench_moe(widths, sizes, rounds), format_table, as_json=as_json, record=record
    )
    return EXIT_DONE


def require_passing_tests() -> None:
    """Run the tests of the layer and its operators; raises ConfigError unless they pass."""
    files = [ROOT / name for name in TESTS]
    if not all(file.is_file() for file in files):
        fix = "Run it in a checkout of the repository."
        raise ConfigError(
            "bench moe", f"its tests are missing ({files[0]}); not benchmarking without them", fix
        )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *map(str, files),
    ]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise ConfigError(
            "bench moe", f"tests failed; not benchmarking:\n{completed.stdout[-2000:]}"
        )


def _without_width(sizes: LayerSizes) -> tuple[int | None, int, int, int]:
    return sizes.hidden, sizes.experts, sizes.top_k, sizes.tokens
