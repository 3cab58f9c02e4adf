"""Every part as a function of tensors, built the same on any device and in any precision: what GPU tests compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance import made
from tests.conformance.test_objective import batches, model_for
from tests.conformance.test_objective import built as built_objective
from tests.families import example, family
from xscale.core.config import decode, encode
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.parallel.precision import precision

LENGTH = 150
"""Tokens: a multiple of no block."""
FAMILIES = ("core", "mixer", "position", "norm", "ffn", "router", "model", "objective")


@dataclass(frozen=True)
class PartOnDevice:
    """A module on its device, and a call of it that gives a tensor."""

    module: nn.Module
    inputs: Sequence[Tensor]
    """Tensors that get gradients too."""
    call: Callable[..., Tensor]

    def loss_and_gradients(self, compiled: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output and, by name, the gradients of a weighted sum of it, all in float64 on the CPU."""
        call = torch.compile(self.call, dynamic=False) if compiled else self.call
        out = call(*self.inputs)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        leaves = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        leaves |= {f"input {number}": x for number, x in enumerate(self.inputs)}
        gradients = torch.autograd.grad((out.float() * weights.float()).sum(), list(leaves.values()), allow_unused=True)
        named = {name: g.double().cpu() for name, g in zip(leaves, gradients, strict=True) if g is not None}
        return out.detach().double().cpu(), named


def subjects() -> Iterator[tuple[str, Entry[Any]]]:
    """Family and entry of each part that a test computes."""
    for name in FAMILIES:
        for entry in family(name):
            yield name, entry


def build(name: str, entry: Entry[Any], device: torch.device, dtype: torch.dtype) -> PartOnDevice:
    """Build the part with the same weights and inputs everywhere, on the device and in the precision."""
    module, inputs, call = _BUILDERS[name](entry, device)
    module = module.float().to(device)
    if dtype != torch.float32:
        # Routers keep float32, as in training.
        precision.cast_parameters(module, dtype, torch.float32)
    leaves = [x.to(device=device, dtype=dtype).requires_grad_() for x in inputs]
    return PartOnDevice(module, leaves, call)


Built = tuple[nn.Module, list[Tensor], Callable[..., Tensor]]


def _core(entry: Entry[Any], device: torch.device) -> Built:
    causal = entry.traits.causal
    part = made.core(entry, causal=causal, length=LENGTH)
    mask = AttentionMask(LENGTH, LENGTH, causal, device=device)
    return part, made.qkv(LENGTH), lambda q, k, v: part(q, k, v, mask)


def _around(entry: Entry[Any]) -> Dims:
    return made.dims(length=LENGTH, causal=getattr(entry.traits, "causal", True))


def _mixer(entry: Entry[Any], device: torch.device) -> Built:
    config = example(entry)
    if "core" in type(config).model_fields:
        # The first core that the mixer holds and that goes its way.
        fits = [core for core in CORES if entry.part.cores is None or core.name in entry.part.cores]
        fits = [core for core in fits if core.traits.causal or not entry.traits.causal]
        config = config.model_copy(update={"core": example(fits[0])})
    part = made.ready(entry.part(config, _around(entry)))
    tokens = made.tokens(LENGTH).to(device)
    return part, [made.drawn(2, LENGTH, made.WIDTH)], lambda x: part(x, tokens)


def _norm(entry: Entry[Any], device: torch.device) -> Built:
    part = made.ready(entry.part(example(entry), made.WIDTH))
    return part, [made.drawn(2, LENGTH, made.WIDTH)], lambda x: part(x)


def _ffn(entry: Entry[Any], device: torch.device) -> Built:
    part = made.ready(entry.part(example(entry), made.dims(length=LENGTH)))
    tokens = made.tokens(LENGTH).to(device)
    return part, [made.drawn(2, LENGTH, made.WIDTH)], lambda x: part(x, tokens)


def _router(entry: Entry[Any], device: torch.device) -> Built:
    """A mixture with this router; its own noise is off."""
    router = encode(example(entry))
    if router.get("jitter"):
        router["jitter"] = 0.0
    data = {"experts": 8, "router": router, "expert": {"kind": "gated", "hidden": 48}}
    data |= {"allow_noncausal_routing": True}
    part = made.ready(Moe(decode(Moe.Config, data), made.dims(length=LENGTH)))
    tokens = made.tokens(LENGTH).to(device)
    return part, [made.drawn(2, LENGTH, made.WIDTH)], lambda x: part(x, tokens)


def _position(entry: Entry[Any], device: torch.device) -> Built:
    """A model with this position."""
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}}
    data = {"width": made.WIDTH, "position": encode(example(entry)), "stack": {"depth": 2, "block": block}}
    for kind in ("decoder", "encoder"):
        part = MODELS.get(kind).part
        config = decode(part.Config, data)
        if not part.check(config, (made.VOCABULARY, LENGTH), "model"):
            break
    else:
        raise AssertionError(f"no model takes the position {entry.name}")
    return _whole_model(part(config, made.VOCABULARY, LENGTH), device, source=False)


def _model(entry: Entry[Any], device: torch.device) -> Built:
    config = example(entry).model_copy(update={"width": made.WIDTH})
    model = entry.part(config, made.VOCABULARY, LENGTH)
    return _whole_model(model, device, source=entry.traits.source)


def _whole_model(model: Any, device: torch.device, *, source: bool) -> Built:
    part = made.ready(model)
    tokens = made.tokens(LENGTH).to(device)
    read = Tokens.from_ids(made.tokens(30).ids).to(device) if source else None
    return part, [], lambda: part(tokens, source=read)


def _objective(entry: Entry[Any], device: torch.device) -> Built:
    objective, model = built_objective(entry), model_for(entry)
    batch = batches(objective).to(device)
    return model, [], lambda: objective.loss(model, batch)


_BUILDERS: dict[str, Callable[[Entry[Any], torch.device], Built]] = {
    "core": _core,
    "mixer": _mixer,
    "norm": _norm,
    "ffn": _ffn,
    "router": _router,
    "position": _position,
    "model": _model,
    "objective": _objective,
}


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))
