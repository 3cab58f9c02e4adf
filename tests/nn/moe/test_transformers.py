"""Layers of the transformers library, their random weights copied: the same outputs to 1e-5."""

import pytest
import torch

from tests.nn.moe.mixture import mixture
from xscale.nn.tokens import Tokens

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
B, T, D, F, E = 2, 16, 24, 40, 8


def put(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    assert parameter.shape == value.shape
    parameter.data.copy_(value)


@pytest.mark.parametrize("capacity", [64, 3])
def test_switch(capacity: int) -> None:
    from transformers.models.switch_transformers import modeling_switch_transformers as theirs

    config = transformers.SwitchTransformersConfig(
        d_model=D, d_ff=F, num_experts=E, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0
    )
    torch.manual_seed(0)
    layer = theirs.SwitchTransformersSparseMLP(config).eval()
    # Their capacity is for each sequence, as ours in evaluation, with the factor that gives the same number.
    ours = mixture(
        experts=E,
        router="switch",
        expert={"kind": "dense", "hidden": F, "activation": "relu"},
        capacity_factor=capacity * E / T,
        eval_capacity_factor=capacity * E / T,
        width=D,
        dtype=torch.float32,
    ).eval()
    put(ours.router.weight, layer.router.classifier.weight)
    put(ours.experts.up, torch.stack([expert.wi.weight for expert in layer.experts.values()]))
    put(ours.experts.down, torch.stack([expert.wo.weight for expert in layer.experts.values()]))
    x = torch.randn(B, T, D)
    wanted = layer(x)
    if capacity == 3:
        assert (wanted == 0).all(-1).any(), "nothing was dropped, so nothing was tested"
    torch.testing.assert_close(ours(x, Tokens.from_ids(torch.zeros(B, T).long())), wanted, atol=1e-5, rtol=0)


def test_mixtral() -> None:
    from transformers.models.mixtral import modeling_mixtral as theirs

    config = transformers.MixtralConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2, router_jitter_noise=0.0
    )
    config._experts_implementation = "eager"
    layer = theirs.MixtralSparseMoeBlock(config).eval()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = mixture(experts=E, expert={"kind": "gated", "hidden": F}, width=D, dtype=torch.float32).eval()
    put(ours.router.weight, layer.gate.weight)
    gate, up = layer.experts.gate_up_proj.chunk(2, dim=1)
    put(ours.experts.gate, gate)
    put(ours.experts.up, up)
    put(ours.experts.down, layer.experts.down_proj)
    x = torch.randn(B, T, D)
    wanted = layer(x)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(ours(x, Tokens.from_ids(torch.zeros(B, T).long())), wanted, atol=1e-5, rtol=0)
