"""How attention's cost scales with the sequence length, and what sparsity saves: `xscale bench attention`.

Each core, each pattern and each mixer without a core runs forward and backward on one sequence. FLOPs are those that
the core reports, which the conformance suite compares with the executed ones; time is CPU time, the best of a few
runs, on one thread, or on a GPU the median of wall times. Denormals are flushed to zero: products of them are ten times
as slow, so the time would depend on the random weights (over 32768 random tokens linformer's scores are large, and most
of its attention weights are denormal).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xscale.bench.harness.machine import BenchDevice, one_thread
from xscale.bench.harness.timing import alternate, peak_bytes
from xscale.core.errors import ConfigError, nearest
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES, Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import name_modules, parameter_axes
from xscale.nn.pattern.pattern import PATTERNS, Pattern, pattern_density
from xscale.nn.pattern.window import Window
from xscale.nn.tokens import Tokens
from xscale_kernels.select import UnusableError

CPU = BenchDevice()
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Backends of torch's fused attention, by the names that it is known by."""
LINEAR = 1.1
"""Largest exponent that counts as linear."""
WIDTH = 64
"""Head width."""
DENSE = 4096
"""Sequence length of the comparison with dense attention."""


@dataclass(frozen=True)
class Growth:
    """Scaling of one core, or of one pattern of the block-sparse core."""

    name: str
    causal: bool
    flops: float
    """Exponent of the FLOPs in the length."""
    time: float | None
    """Exponent of the time in the length; None if the FLOPs are not linear, so that it was not timed."""
    seconds: float | None
    """Seconds at the longest length."""


@dataclass(frozen=True)
class Saving:
    """Block-sparse attention against torch's attention, forward and backward over `DENSE` tokens."""

    against: str
    causal: bool
    density: float
    """Fraction of the block pairs that causal order allows."""
    times_faster: float
    memory: float
    """Peak memory over the baseline's."""


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Exponent of a power law, by least squares on the logarithms."""
    points = [(math.log(x), math.log(y)) for x, y in zip(lengths, values, strict=True)]
    x0, y0 = (sum(coordinates) / len(points) for coordinates in zip(*points, strict=True))
    slope: float = sum((x - x0) * (y - y0) for x, y in points) / sum(
        (x - x0) ** 2 for x, _ in points
    )
    return slope


def cases() -> Iterator[tuple[str, Any, bool]]:
    """Yield every core, pattern and mixer around no core, with its default config; causal if it can be."""
    for core in CORES:
        if core.part is not BlockSparse:
            yield core.name, core.part.Config(), core.traits.causal
    for pattern in PATTERNS:
        yield (
            f"block_sparse {pattern.name}",
            BlockSparse.Config(pattern=pattern.part.Config()),
            pattern.traits.causal,
        )
    for mixer in MIXERS:
        holds_core = issubclass(mixer.part, Attention) or "core" in mixer.part.Config.model_fields
        # Luna's packed sequence, and so its cost, is a part of the sequence; a Fourier transform has no multiply-adds.
        if not holds_core and mixer.name not in ("luna", "fourier"):
            yield f"mixer {mixer.name}", mixer.part.Config(), mixer.traits.causal


def measure_growth(
    name: str, config: Any, causal: bool, lengths: Sequence[int], heads: int, on: BenchDevice = CPU
) -> Growth:
    """Measure the exponents of one case."""
    flops = exponent(lengths, [multiply_adds(config, length, causal, heads) for length in lengths])
    if flops > LINEAR:
        return Growth(name, causal, flops, None, None)
    times = []
    for length in lengths:
        run = mixer_run if is_mixer(config) else core_run
        times.append(seconds_of({name: run(config, length, causal, heads, on)}, on)[name])
    return Growth(name, causal, flops, exponent(lengths, times), times[-1])


def is_mixer(config: Any) -> bool:
    """Return whether the config is that of a mixer, and not of a core."""
    return any(type(config) is entry.part.Config for entry in MIXERS)


def multiply_adds(config: Any, length: int, causal: bool, heads: int) -> float:
    """Count the multiply-adds of a forward: those of a core, or those of a mixer with its weight matrices."""
    if not is_mixer(config):
        return core_of(config, length, causal, heads).multiply_adds(length, length, heads, WIDTH)
    with torch.device("meta"):
        mixer = mixer_of(config, length, causal, heads)
    axes = parameter_axes(mixer)
    weights = sum(
        value.numel() for name, value in mixer.named_parameters() if "tokens" not in axes[name]
    )
    parts = [module for module in mixer.modules() if isinstance(module, Mixer)]
    return float(weights * length + sum(part.multiply_adds(length, length) for part in parts))


def core_run(
    config: Any, length: int, causal: bool, heads: int, on: BenchDevice = CPU
) -> Callable[[], object]:
    """Return a call that runs a core forward and backward."""
    core = core_of(config, length, causal, heads, on)
    mask = AttentionMask(length, length, causal, device=on.device)
    return forward_backward(lambda q, k, v: core(q, k, v, mask), inputs(length, heads, on))


def mixer_run(
    config: Any, length: int, causal: bool, heads: int, on: BenchDevice = CPU
) -> Callable[[], object]:
    """Return a call that runs a mixer forward and backward."""
    mixer = mixer_of(config, length, causal, heads)
    materialize(mixer, 0, str(on.device), on.dtype)
    tokens = Tokens.from_ids(torch.zeros(1, length, dtype=torch.long, device=on.device))
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(1, length, heads * WIDTH, generator=generator)
        .to(on.device, on.dtype)
        .requires_grad_()
    )
    return forward_backward(lambda x: mixer(x, tokens), [x])


def mixer_of(config: Any, length: int, causal: bool, heads: int) -> Mixer:
    """Build the mixer in evaluation mode, without values."""
    mixer: Mixer = MIXERS.build(
        config, Dims(heads * WIDTH, depth=1, vocabulary=2, length=length, causal=causal)
    )
    name_modules(mixer)
    return mixer.eval()


def core_of(config: Any, length: int, causal: bool, heads: int, on: BenchDevice = CPU) -> Core:
    """Build the core in evaluation mode with initial weights."""
    dims = Dims(width=heads * WIDTH, depth=1, vocabulary=2, length=length, causal=causal)
    core: Core = CORES.build(config, dims, heads, WIDTH)
    materialize(core, 0, str(on.device), on.dtype)
    return core.eval()


def inputs(length: int, heads: int, on: BenchDevice = CPU) -> list[Tensor]:
    """Draw q, k and v [1, H, T, K], which require gradients."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, heads, length, WIDTH, generator=generator) for _ in range(3)]
    return [x.to(on.device, on.dtype).requires_grad_() for x in drawn]


def forward_backward(attend: Callable[..., Tensor], qkv: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call that runs forward and backward."""
    gradient = torch.ones_like(qkv[0])
    return lambda: torch.autograd.grad(attend(*qkv), qkv, gradient)


def seconds_of(
    runs: dict[str, Callable[[], object]], on: BenchDevice = CPU, repeats: int = 3
) -> dict[str, float]:
    """Seconds of each run; the runs alternate, after one warm-up."""
    timings = alternate(runs, on.clock, repeats)
    return {name: on.seconds(timings, name) for name in runs}


def savings(
    pattern: Pattern.Config, heads: int, repeats: int = 5, on: BenchDevice = CPU
) -> list[Saving]:
    """Compare a pattern with torch's fused attention, dense and under the pattern's mask, and with stored scores.

    On a GPU each backend of torch's attention is a baseline.
    """
    measured = []
    for causal in (False, True):
        config = BlockSparse.Config(pattern=pattern)
        core = core_of(config, DENSE, causal, heads, on)
        mask = AttentionMask(DENSE, DENSE, causal, device=on.device)
        blocks = torch.from_numpy(core.block_layout(DENSE, heads).copy()).to(on.device)
        attn_mask = blocks.repeat_interleave(config.block, 1).repeat_interleave(config.block, 2)
        attn_mask = attn_mask.tril() if causal else attn_mask
        qkv = inputs(DENSE, heads, on)

        def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor = attn_mask) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

        def sparse(
            q: Tensor, k: Tensor, v: Tensor, core: Core = core, mask: AttentionMask = mask
        ) -> Tensor:
            out: Tensor = core(q, k, v, mask)
            return out

        def scores(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor = attn_mask) -> Tensor:
            weights: Tensor = (
                (q @ k.mT * WIDTH**-0.5).masked_fill(~attn_mask, -math.inf).softmax(-1)
            )
            return weights @ v

        implementations: dict[str, Callable[..., Tensor]] = {
            "sparse": sparse,
            **sdpa_sides(SDPA_BACKENDS if on.on_gpu else (), causal),
            "fused, with the mask": masked,
            "stored scores": scores,
        }
        runs = {name: forward_backward(attend, qkv) for name, attend in implementations.items()}
        times = seconds_of(runs, on, repeats)
        bytes_ = {name: peak_bytes(run, on.device.type) for name, run in runs.items()}
        density = pattern_density(pattern, DENSE, causal, heads)
        measured += [
            Saving(
                name,
                causal,
                density,
                times[name] / times["sparse"],
                bytes_["sparse"] / bytes_[name],
            )
            for name in list(implementations)[1:]
        ]
    return measured


def check_lengths(lengths: Sequence[int]) -> Sequence[int]:
    """Return the lengths; ConfigError if no growth can be measured over them."""
    if len(lengths) < 2 or min(lengths) < 64 or len(set(lengths)) < len(lengths):
        raise ConfigError(
            "--lengths",
            "scaling needs at least two different lengths of 64 or more",
            "4096,8192,16384",
        )
    return lengths


def sdpa_sides(
    backends: Iterable[str] = SDPA_BACKENDS, causal: bool = True
) -> dict[str, Callable[..., Tensor]]:
    """Return torch's fused attention, and the same by each named backend, as functions of q, k and v.

    A backend that cannot run the call raises UnusableError with the reason that torch logs.
    """

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def by(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                try:
                    return fused(q, k, v)
                except RuntimeError as error:
                    if "No viable backend" not in str(error):
                        raise
                    raise UnusableError(f"SDPA: {backend.name} cannot run this call") from None

        return attend

    return {"fused": fused, **{f"fused, {name}": by(SDPA_BACKENDS[name]) for name in backends}}


def bench(
    only: Sequence[str], lengths: Sequence[int], heads: int, on: BenchDevice = CPU, *, as_json: bool
) -> None:
    """Print how each case's cost scales and what a window saves; ConfigError for an unknown case."""
    known = {name: (config, causal) for name, config, causal in cases()}
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            unknown[0], "there is no such core, pattern or mixer", nearest(unknown[0], known)
        )
    check_lengths(lengths)
    with one_thread():
        rows = []
        for name in only or known:
            rows.append(measure_growth(name, *known[name], lengths, heads, on))
            if not as_json:
                print(_line(rows[-1]), flush=True)
        saved = [] if only else savings(Window.Config(window=7), heads=4, on=on)
    if as_json:
        print(
            json.dumps(
                {"growth": list(map(asdict, rows)), "savings": list(map(asdict, saved))}, indent=2
            )
        )
        return
    for saving in saved:
        order = "causal" if saving.causal else "bidirectional"
        print(
            f"block_sparse window=7, {order}, {saving.density:.1%} of the blocks: "
            f"{saving.times_faster:.2f} times as fast as dense attention, {saving.against}; "
            f"{saving.memory:.2f} of its memory"
        )


def _line(row: Growth) -> str:
    order = "causal" if row.causal else "bidirectional"
    if row.time is None or row.seconds is None:
        return f"{row.name:<28} {order:<13} FLOPs T^{row.flops:.2f}"
    return f"{row.name:<28} {order:<13} FLOPs T^{row.flops:.2f}  time T^{row.time:.2f}  {row.seconds:7.3f} s"
