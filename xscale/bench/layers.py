"""Whole attention layers side by side, forward and backward: `xscale bench layers`.

Relative positions run against plain attention: projections and torch's fused attention with a constant bias [1, H, T,
T]. Layers of papers run against those of the packages that people install for them, where these are installed. Layers
take turns on one thread, in training mode and float32; the time is the shortest CPU time of a few rounds. On a GPU it
is the median of the wall times, in the precision that is asked for.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.bench.harness.machine import BenchDevice, one_thread
from xscale.bench.harness.timing import alternate, peak_bytes
from xscale.core.config import decode
from xscale.core.errors import ConfigError, nearest
from xscale.nn.dims import Dims
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.module import name_modules
from xscale.nn.position.position import POSITIONS
from xscale.nn.random import reseed
from xscale.nn.tokens import Tokens

CPU = BenchDevice()
POSITION_CASES = ("relative", "shaw", "transformer_xl", "deberta")
"""Positions that are compared with plain attention."""


@dataclass(frozen=True)
class Package:
    """A layer that a package on PyPI has."""

    name: str
    """Name of the package, for pip."""
    module: str
    """Name of its module."""
    core: dict[str, Any]
    """The core here that does the same."""
    build: Callable[[Any, int, int, int, bool], nn.Module]
    """The package's layer, from its module, width, heads, length and whether it is causal."""
    causal: tuple[bool, ...]
    """The directions that both have."""


def _linformer(module: Any, width: int, heads: int, length: int, causal: bool) -> nn.Module:
    layer: nn.Module = module.LinformerSelfAttention(width, length, k=256, heads=heads)
    return layer


def _sinkhorn(module: Any, width: int, heads: int, length: int, causal: bool) -> nn.Module:
    # Not permutative is an approximation of the package's own, without Sinkhorn's iterations.
    options = {"heads": heads, "causal": causal, "non_permutative": False, "sinkhorn_iter": 7}
    layer: nn.Module = module.SinkhornSelfAttention(width, 64, length, **options)
    return layer


def _nystrom(module: Any, width: int, heads: int, length: int, causal: bool) -> nn.Module:
    options = {"dim_head": width // heads, "heads": heads, "num_landmarks": 64, "residual": False}
    layer: nn.Module = module.NystromAttention(width, **options)
    return layer


PACKAGES = {
    "linformer": Package(
        "linformer",
        "linformer",
        {"kind": "linformer", "projected_length": 256},
        _linformer,
        (False,),
    ),
    "sinkhorn": Package(
        "sinkhorn-transformer",
        "sinkhorn_transformer.sinkhorn_transformer",
        {"kind": "sinkhorn", "block": 64, "iterations": 7},
        _sinkhorn,
        (False, True),
    ),
    "nystrom": Package(
        "nystrom-attention",
        "nystrom_attention",
        {"kind": "nystrom", "landmarks": 64},
        _nystrom,
        (False,),
    ),
}


@dataclass(frozen=True)
class LayerComparison:
    """One layer here and its baseline."""

    name: str
    against: str
    causal: bool
    length: int
    seconds: float
    baseline_seconds: float
    memory: float
    """Peak memory over the baseline's."""

    def __str__(self) -> str:
        order = "causal" if self.causal else "bidirectional"
        return (
            f"{self.name:<16} {order:<13} T = {self.length:<6} {1e3 * self.seconds:9.1f} ms  "
            f"{self.seconds / self.baseline_seconds:5.2f} of the time and {self.memory:5.2f} of the memory of "
            f"{self.against}"
        )


def additive_mask(heads: int, length: int, causal: bool) -> Tensor:
    """Draw a mask [1, H, T, T] that torch's fused attention adds to the scores, -inf at later keys if causal."""
    # With three dimensions torch would take it for a mask that its fused attention cannot have.
    mask = torch.randn(1, heads, length, length, generator=torch.Generator().manual_seed(1))
    return (
        mask.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        if causal
        else mask
    )


class PlainAttention(nn.Module):
    """Projections around torch's fused attention with a constant bias on the scores."""

    bias: Tensor

    def __init__(self, width: int, heads: int, length: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.register_buffer("bias", additive_mask(heads, length, causal))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = (
            self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )  # [B, H, T, K] each
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        out: Tensor = self.o(o.transpose(1, 2).flatten(2))
        return out


def attention_of(section: dict[str, Any], width: int, length: int, causal: bool) -> Attention:
    """Build an attention mixer of this config with initial weights."""
    dims = Dims(width, depth=1, vocabulary=2, length=length, causal=causal)
    mixer = Attention(decode(Attention.Config, section), dims)
    name_modules(mixer)
    materialize(mixer, 0)
    return mixer


def layer_of(
    section: dict[str, Any], width: int, length: int, causal: bool
) -> Callable[[Tensor], Tensor]:
    """Build an attention mixer of this config, in training mode; call it with x [B, T, D]."""
    return MixerCall(attention_of(section, width, length, causal).train(), length)


class MixerCall(nn.Module):
    """A mixer as a function of x alone."""

    def __init__(self, mixer: Attention, length: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.tokens = Tokens(
            torch.zeros(1, length, dtype=torch.long),
            torch.arange(length)[None],
            forward=Forward(rng_seed=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        reseed(0, "layer")
        if self.tokens.ids.device != x.device:
            self.tokens = self.tokens.to(x.device)
        out: Tensor = self.mixer(x, self.tokens)
        return out


def forward_backward(
    layer: Any, width: int, length: int, on: BenchDevice = CPU
) -> Callable[[], object]:
    """Return a call that runs a layer forward and backward, to its input and its weights, on the device."""
    layer.to(on.device, on.dtype)
    generator = torch.Generator().manual_seed(0)
    x, gradient = (
        torch.randn(1, length, width, generator=generator).to(on.device, on.dtype) for _ in range(2)
    )
    leaves = [
        x.requires_grad_(),
        *(weight for weight in layer.parameters() if weight.requires_grad),
    ]
    return lambda: torch.autograd.grad(layer(x), leaves, gradient, allow_unused=True)


def compare(
    name: str,
    against: str,
    layers: tuple[Any, Any],
    width: int,
    length: int,
    causal: bool,
    rounds: int,
    on: BenchDevice = CPU,
) -> LayerComparison:
    """Time a layer and its baseline in turns, and measure the memory of each."""
    runs = {
        key: forward_backward(layer, width, length, on)
        for key, layer in zip(("ours", "baseline"), layers, strict=True)
    }
    timings = alternate(runs, on.clock, rounds)
    seconds = {key: on.seconds(timings, key) for key in runs}
    peak = {key: peak_bytes(run, on.device.type) for key, run in runs.items()}
    memory = peak["ours"] / peak["baseline"]
    return LayerComparison(
        name, against, causal, length, seconds["ours"], seconds["baseline"], memory
    )


def compare_position(
    kind: str, width: int, heads: int, length: int, rounds: int, on: BenchDevice = CPU
) -> list[LayerComparison]:
    """Compare a position with plain attention, causal and bidirectional where the position can be both."""
    compared = []
    for causal in (False, True):
        position = POSITIONS.get(kind).part.Config()
        section = {"heads": heads, "position": {"kind": position.kind}}
        layer = layer_of(section, width, length, causal)
        plain = PlainAttention(width, heads, length, causal)
        compared.append(
            compare(kind, "plain attention", (layer, plain), width, length, causal, rounds, on)
        )
    return compared


def compare_package(
    name: str, width: int, heads: int, length: int, rounds: int, on: BenchDevice = CPU
) -> list[LayerComparison] | str:
    """Compare a layer with that of its package; where this is not installed, say so."""
    package = PACKAGES[name]
    try:
        module = importlib.import_module(package.module)
    except ImportError as missing:
        return f"{name:<16} not compared: {missing} (pip install {package.name})"
    compared = []
    for causal in package.causal:
        layer = layer_of({"heads": heads, "core": package.core}, width, length, causal)
        installed = package.build(module, width, heads, length, causal)
        compared.append(
            compare(name, package.name, (layer, installed), width, length, causal, rounds, on)
        )
    return compared


def bench(
    only: Sequence[str],
    width: int,
    heads: int,
    lengths: Sequence[int],
    rounds: int,
    on: BenchDevice = CPU,
    *,
    as_json: bool,
) -> None:
    """Print how each layer compares with its baseline; ConfigError for an unknown layer."""
    known: dict[str, Callable[..., list[LayerComparison] | str]] = {
        **{kind: partial(compare_position, kind) for kind in POSITION_CASES},
        **{name: partial(compare_package, name) for name in PACKAGES},
    }
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            unknown[0], "there is no such layer to compare", nearest(unknown[0], known)
        )
    if width % heads:
        raise ConfigError(
            "--heads",
            f"{heads} heads do not divide the width {width}",
            "Give a divisor of the width.",
        )
    with one_thread():
        rows = []
        for length in lengths:
            for name in only or known:
                compared = known[name](width, heads, length, rounds, on)
                for row in [compared] if isinstance(compared, str) else compared:
                    rows.append({"skipped": row} if isinstance(row, str) else asdict(row))
                    if not as_json:
                        print(row, flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))
