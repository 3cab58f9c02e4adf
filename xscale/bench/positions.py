"""Relative positions beside plain attention, and their growth: `xscale bench attention --positions`.

The baseline is torch's fused attention of the same q, k and v with an additive mask [1, H, T, T] of random numbers that
requires no gradient, -inf at later keys if causal (a mask of three dimensions would not be fused). Through block-sparse
attention (a window) the baseline is the same without a position. Both run forward and backward, to q, k and v, and here
also to the position's parameters, in turns on one thread in float32.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from xscale.bench.attention import WIDTH, check_lengths, exponent, inputs
from xscale.bench.harness.machine import one_thread
from xscale.bench.harness.timing import alternate, host_clock, peak_bytes
from xscale.bench.layers import additive_mask, attention_of
from xscale.core.errors import ConfigError, nearest
from xscale.nn.tokens import Tokens

RELATIVE_POSITIONS = (
    "relative",
    "gaussian",
    "shaw",
    "music_transformer",
    "transformer_xl",
    "deberta",
)
"""Positions whose terms of the scores have parameters and depend on the distance."""

WINDOW = {"kind": "block_sparse", "pattern": {"kind": "window", "window": 9}}
"""Core of block-sparse attention: 256 keys on either side, in blocks of 64."""

LENGTH = 2048
"""Tokens of the comparison with plain attention."""


@dataclass(frozen=True)
class PositionCost:
    """Attention with a position against plain attention, or against the same core without a position."""

    position: str
    core: str
    causal: bool
    length: int
    seconds: float
    """CPU time, the shortest of the rounds."""
    time: float
    """Median over the rounds of the CPU time over the baseline's."""
    memory: float
    """Peak memory over the baseline's."""

    @property
    def baseline(self) -> str:
        return "plain attention" if self.core == "softmax" else "the core without a position"

    def __str__(self) -> str:
        order = "causal" if self.causal else "bidirectional"
        return (
            f"{self.core:<13} {self.position:<18} {order:<13} T = {self.length:<6} {1e3 * self.seconds:8.1f} ms  "
            f"{self.time:5.2f} of the time and {self.memory:5.2f} of the memory of {self.baseline}"
        )


@dataclass(frozen=True)
class PositionGrowth:
    """Growth of a position's cost through block-sparse attention."""

    position: str
    causal: bool
    time: float
    """Exponent of the time in the length."""
    memory: float
    """Exponent of the peak memory in the length."""

    def __str__(self) -> str:
        order = "causal" if self.causal else "bidirectional"
        name = f"block_sparse window, {self.position}"
        return f"{name:<38} {order:<13} time T^{self.time:.2f}  memory T^{self.memory:.2f}"


def position_run(
    kind: str, core: dict[str, Any], length: int, causal: bool, heads: int
) -> Callable[[], object]:
    """Return a call that runs a core with a position forward and backward."""
    section = {"heads": heads, "core": core, "position": {"kind": kind}}
    mixer = attention_of(section, heads * WIDTH, length, causal)
    tokens = Tokens.from_ids(torch.zeros(1, length, dtype=torch.long))
    qkv = inputs(length, heads)
    assert mixer.position is not None
    leaves, gradient = [*qkv, *mixer.position.parameters()], torch.ones_like(qkv[0])

    def run() -> object:
        q, k, v = qkv
        mask = mixer.make_mask(q, k, tokens, tokens)
        return torch.autograd.grad(mixer.core(q, k, v, mask), leaves, gradient)

    return run


def plain_run(length: int, causal: bool, heads: int) -> Callable[[], object]:
    """Return a call that runs torch's fused attention with an additive mask forward and backward."""
    qkv = inputs(length, heads)
    attn_mask = additive_mask(heads, length, causal)
    gradient = torch.ones_like(qkv[0])

    def run() -> object:
        q, k, v = qkv
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return torch.autograd.grad(out, qkv, gradient)

    return run


def measure_positions(
    kinds: Sequence[str],
    length: int,
    heads: int,
    rounds: int = 3,
    core: dict[str, Any] | None = None,
) -> Iterator[PositionCost]:
    """Compare positions with plain attention, or through a `core` without a position, causal and bidirectional."""
    section = core or {"kind": "softmax"}
    for causal in (False, True):
        runs = {kind: position_run(kind, section, length, causal, heads) for kind in kinds}
        runs["plain"] = (
            plain_run(length, causal, heads)
            if core is None
            else position_run("none", core, length, causal, heads)
        )
        timings = alternate(runs, host_clock(), rounds)
        peak = {name: peak_bytes(run, "cpu") for name, run in runs.items()}
        for kind in kinds:
            seconds = timings.fastest(kind, "processor_seconds")
            ratio = timings.ratio(kind, "plain", "processor_seconds")
            yield PositionCost(
                kind, section["kind"], causal, length, seconds, ratio, peak[kind] / peak["plain"]
            )


def measure_position_growth(
    kinds: Sequence[str], lengths: Sequence[int], heads: int
) -> Iterator[PositionGrowth]:
    """Measure the exponents of positions through block-sparse attention."""
    for kind in kinds:
        for causal in (False, True):
            times, bytes_ = [], []
            for length in lengths:
                run = position_run(kind, WINDOW, length, causal, heads)
                times.append(
                    alternate({kind: run}, host_clock(), 3).fastest(kind, "processor_seconds")
                )
                bytes_.append(float(peak_bytes(run, "cpu")))
            yield PositionGrowth(kind, causal, exponent(lengths, times), exponent(lengths, bytes_))


def bench_positions(
    only: Sequence[str], lengths: Sequence[int], heads: int, *, as_json: bool
) -> None:
    """Print what relative positions cost and how it grows; ConfigError for an unknown position."""
    if unknown := [kind for kind in only if kind not in RELATIVE_POSITIONS]:
        what = "there is no such relative position with parameters"
        raise ConfigError(unknown[0], what, nearest(unknown[0], RELATIVE_POSITIONS))
    kinds = only or RELATIVE_POSITIONS
    check_lengths(lengths)
    rows: list[PositionCost | PositionGrowth] = []
    with one_thread():
        costs = (measure_positions(kinds, LENGTH, heads, core=core) for core in (None, WINDOW))
        growth = measure_position_growth(kinds, lengths, 1)
        for row in itertools.chain[PositionCost | PositionGrowth](*costs, growth):
            rows.append(row)
            if not as_json:
                print(row, flush=True)
    if as_json:
        by_kind = {"costs": PositionCost, "growth": PositionGrowth}
        print(
            json.dumps(
                {
                    name: [asdict(row) for row in rows if isinstance(row, kind)]
                    for name, kind in by_kind.items()
                }
            )
        )
