"""Layers that are timed against each other: xscale's, a dense one, a loop over experts, and those of transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import decode
from xscale.core.errors import Problem
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.materialize import materialize
from xscale.nn.module import name_modules
from xscale.nn.tokens import Tokens

Forward = Callable[[Tensor], Tensor]
"""[B, T, D] -> [B, T, D]."""
TOLERANCE = 1e-4
"""Largest difference of outputs of layers with the same weights, relative to the largest output."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the timed layers."""

    width: int = 512
    hidden: int | None = None
    """Hidden width of one expert; None: twice the width."""
    experts: int = 8
    top_k: int = 2
    tokens: int = 2048
    """Tokens of one rank, in sequences of up to 512."""

    @property
    def inner(self) -> int:
        return self.hidden or 2 * self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, T, D]."""
        rows = next(
            rows
            for rows in range(-(-self.tokens // 512), self.tokens + 1)
            if self.tokens % rows == 0
        )
        return rows, self.tokens // rows, self.width

    def check(self, ranks: int) -> list[Problem]:
        """Problems of the command line options."""
        options = {
            "--width": self.width,
            "--hidden": self.inner,
            "--experts": self.experts,
            "--tokens": self.tokens,
        }
        problems = [
            Problem(name, f"must be at least 1, got {value}")
            for name, value in options.items()
            if value < 1
        ]
        if not problems and not 1 <= self.top_k <= self.experts:
            what = f"top_k={self.top_k} is not between 1 and experts={self.experts}"
            problems.append(
                Problem("--top-k", what, f"Take 1 to {self.experts}, or more --experts.")
            )
        if not problems and self.experts % ranks:
            what = f"processes={ranks} does not divide experts={self.experts}"
            problems.append(Problem("--processes", what, "Take a number that divides --experts."))
        return problems


@dataclass(frozen=True)
class TimedLayer:
    """One layer in the benchmark."""

    name: str
    forward: Forward
    parameters: Sequence[Tensor]
    reference: str = ""
    """Name of the layer whose outputs it must match; empty: none."""


def topk_moe(
    sizes: LayerSizes, device: torch.device, dtype: torch.dtype, router_kind: str = "topk"
) -> Moe:
    """Mixtral's layer: the router `topk` over gated experts; with `round_robin` each expert gets as many tokens."""
    router = {"kind": router_kind, "top_k": sizes.top_k}
    expert = {"kind": "gated", "hidden": sizes.inner}
    moe = _build(
        {"kind": "moe", "experts": sizes.experts, "router": router, "expert": expert},
        sizes,
        device,
        dtype,
    )
    assert isinstance(moe, Moe)
    return moe


def switch_moe(sizes: LayerSizes, device: torch.device, dtype: torch.dtype) -> Moe:
    """The T5-like layer of its authors: the router `switch` over dense ReLU experts of four times the width."""
    expert = {"kind": "dense", "activation": "relu", "hidden": sizes.hidden or 4 * sizes.width}
    moe = _build(
        {
            "kind": "moe",
            "experts": sizes.experts,
            "router": {"kind": "switch", "jitter": 0.0},
            "expert": expert,
        },
        sizes,
        device,
        dtype,
    )
    assert isinstance(moe, Moe)
    return moe


def dense_ffn(sizes: LayerSizes, device: torch.device, dtype: torch.dtype) -> Ffn:
    """A gated ffn as wide as all experts of a token together."""
    return _build({"kind": "gated", "hidden": sizes.top_k * sizes.inner}, sizes, device, dtype)


def _build(
    data: dict[str, Any], sizes: LayerSizes, device: torch.device, dtype: torch.dtype
) -> Ffn:
    length = sizes.shape[1]
    part = FFNS.get(data.pop("kind")).part
    layer: Ffn = part(decode(part.Config, data), Dims(sizes.width, 2, 64, length, causal=True))
    name_modules(layer)
    materialize(layer, 0, str(device), dtype)
    return layer


def as_function(layer: Ffn, sizes: LayerSizes, device: torch.device) -> Forward:
    """The layer as a function of its input only."""
    tokens = Tokens.from_ids(torch.zeros(sizes.shape[:2], dtype=torch.int64, device=device))
    return lambda x: layer(x, tokens)


def loop_over_experts(moe: Moe) -> Forward:
    """The same weights in a plain loop over experts."""

    router: Any = moe.router

    def forward(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gates, experts = F.linear(flat, router.weight).softmax(1).topk(router.config.top_k, dim=1)
        gates = gates / gates.sum(1, keepdim=True)
        y = torch.zeros_like(flat)
        assert moe.experts.gate is not None
        for expert in range(moe.config.experts):
            token, choice = torch.where(experts == expert)
            rows = flat[token]
            hidden = F.silu(F.linear(rows, moe.experts.gate[expert])) * F.linear(
                rows, moe.experts.up[expert]
            )
            outputs = F.linear(hidden, moe.experts.down[expert])
            y = y.index_add(0, token, outputs * gates[token, choice, None])
        return y.view(x.shape)

    return forward


def transformers_mixtral(moe: Moe, sizes: LayerSizes) -> list[TimedLayer]:
    """Mixtral's sparse block of transformers with xscale's weights, in each usable implementation."""
    if find_spec("transformers") is None:
        return []
    import transformers
    from transformers.models.mixtral import modeling_mixtral

    layers = []
    for name in ("eager", "grouped_mm"):
        config = transformers.MixtralConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.inner,
            num_local_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
            router_jitter_noise=0.0,
        )
        config._experts_implementation = name
        layer: Any = modeling_mixtral.MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call]
        layer.to(moe.experts.up)
        assert moe.experts.gate is not None
        _copy_into(layer.gate.weight, moe.router.get_parameter("weight"))
        _copy_into(layer.experts.gate_up_proj, torch.cat((moe.experts.gate, moe.experts.up), dim=1))
        _copy_into(layer.experts.down_proj, moe.experts.down)
        layers.append(
            TimedLayer(f"transformers Mixtral, {name}", layer, list(layer.parameters()), "xscale")
        )
    return layers


def transformers_switch(moe: Moe, sizes: LayerSizes) -> list[TimedLayer]:
    """The sparse layer of transformers' Switch Transformer with xscale's weights; no tokens are dropped."""
    if find_spec("transformers") is None:
        return []
    import transformers
    from transformers.models.switch_transformers import modeling_switch_transformers

    config = transformers.SwitchTransformersConfig(
        d_model=sizes.width,
        d_ff=sizes.hidden or 4 * sizes.width,
        num_experts=sizes.experts,
        expert_capacity=sizes.tokens,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    layer: Any = modeling_switch_transformers.SwitchTransformersSparseMLP(config).to(moe.experts.up)
    _copy_into(layer.router.classifier.weight, moe.router.get_parameter("weight"))
    for index, expert in enumerate(layer.experts.values()):
        _copy_into(expert.wi.weight, moe.experts.up[index])
        _copy_into(expert.wo.weight, moe.experts.down[index])
    return [TimedLayer("transformers Switch", layer, list(layer.parameters()), "xscale, switch")]


def _copy_into(parameter: Tensor, value: Tensor) -> None:
    assert parameter.shape == value.shape
    parameter.data.copy_(value.detach())
