"""Experts of gpt-oss (OpenAI 2025): gated units with a clamp, an offset and biases, against the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.moe import literal
from tests.nn.moe.mixture import mixture, sample
from xscale.nn.ffn.moe.moe import Moe

CLAMP = 0.3
CLAMPED: dict[str, Any] = {"kind": "gated", "hidden": 8, "gate": "quick_geglu", "clamp_value": CLAMP}
ALPHA = {"quick_geglu": 1.702, "swiglu": 1.0}


def expert_of(moe: Moe, index: int, gate: str) -> Any:
    """The expert's formula: x [D] -> [D]."""

    def compute(x: Tensor) -> Tensor:
        weights = {name: parameter[index] for name, parameter in moe.experts.named_parameters()}
        left = weights["gate"] @ x + weights.get("gate_bias", 0)
        right = weights["up"] @ x + weights.get("up_bias", 0)
        left, right = (
            left.minimum(torch.tensor(CLAMP)),
            right.maximum(torch.tensor(-CLAMP)).minimum(torch.tensor(CLAMP)),
        )
        hidden = left / (1 + torch.exp(-ALPHA[gate] * left)) * (right + 1)
        return weights["down"] @ hidden + weights.get("down_bias", 0)

    return compute


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": True},
        {"gate": "swiglu", "bias": True},
        # A width and a gate of which the operator of whole experts computes all but the clamp.
        {"gate": "swiglu", "hidden": 32},
    ],
)
def test_experts_are_their_formula(changes: dict[str, Any]) -> None:
    expert = {**CLAMPED, "linear_offset": 1.0, **changes}
    moe, (x, tokens) = mixture(expert=expert), sample()
    for parameter in moe.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = x.flatten(0, 1)
    experts = [expert_of(moe, index, expert["gate"]) for index in range(moe.config.experts)]
    wanted = literal.mix(rows, literal.mixtral(rows, moe.router.weight, 2), experts)
    torch.testing.assert_close(moe(x, tokens).flatten(0, 1), wanted)
