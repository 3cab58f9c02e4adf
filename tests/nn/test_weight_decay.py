"""Weight decay applies to matrices and tables, by what each parameter declares and not by the number of its axes."""

import re
from typing import Any

import pytest
import torch

from tests.families import each, example
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Dense, Gated
from xscale.nn.ffn.moe.experts import Experts
from xscale.nn.init import ONES
from xscale.nn.model.decoder import Decoder
from xscale.nn.module import Module, parameter_decays
from xscale.nn.norm.norm import NORMS
from xscale.optim.optimizer.adamw import AdamW
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.parallel.engine.fsdp import optimizer_weights
from xscale.parallel.shard.sharded import sharded_parameters

SCALES = re.compile(r"bias|gain|sigma|temperature|(^|\.)distance$|(near|far)_weight$")
"""Names of gains, biases, temperatures and scales."""


def wrongly_decayed(module: Module) -> list[str]:
    """Gains, biases and scales that decay."""
    constant = {name for name, init in module.init.items() if init == ONES}
    return [name for name, decays in module.decays.items() if decays and (SCALES.search(name) or name in constant)]


@each(CORES)
def test_no_scale_of_a_core_decays(entry: Entry[Any]) -> None:
    dims = Dims(width=32, depth=2, vocabulary=32, length=64, causal=entry.traits.causal)
    with torch.device("meta"):
        core = CORES.build(example(entry), dims, 4, 8)
    assert [name for module in core.modules() if isinstance(module, Module) for name in wrongly_decayed(module)] == []


@each(NORMS)
def test_no_norm_decays(entry: Entry[Any]) -> None:
    norm = NORMS.build(entry.part.Config(), 8)
    assert not any(norm.decays.values())


@pytest.mark.parametrize("config", [Dense.Config(bias=True, hidden=12), Gated.Config(bias=True, hidden=12)])
def test_biases_of_experts_do_not_decay_and_their_matrices_do(config: Any) -> None:
    dims = Dims(width=8, depth=2, vocabulary=32, length=64, causal=True)
    decays = Experts(config, dims, 3, 0.0).decays
    assert {name for name, value in decays.items() if not value} == {name for name in decays if name.endswith("_bias")}
    assert decays["up"]
    assert decays["down"]


def test_a_step_without_a_gradient_shrinks_what_decays_and_leaves_the_rest() -> None:
    config = Decoder.Config.model_validate({"width": 16})
    model = Decoder(config, 32, 12)
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, 2.0 + len(name) / 100)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = optimizer_weights(sharded_parameters(model))
    optimizer = OPTIMIZERS.build(AdamW.Config(weight_decay=0.5), weights)
    optimizer.step([torch.zeros_like(weight.value) for weight in weights], 0.1)
    for name, decays in parameter_decays(model).items():
        after = dict(model.named_parameters())[name].detach()
        assert torch.allclose(after, before[name] * (1 - 0.1 * 0.5) if decays else before[name]), name
    assert set(parameter_decays(model).values()) == {True, False}


def test_a_gain_that_decays_is_seen() -> None:
    """Negative control."""
    module = Module()
    module.declare("gains", (4, 8), ("state", "state"), ONES)
    assert wrongly_decayed(module) == ["gains"]
