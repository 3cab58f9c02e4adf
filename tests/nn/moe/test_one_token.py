"""A mixture's path for one token of generation computes what the path for any number of tokens does."""

from typing import Any

import pytest
import torch

from tests.nn.moe.mixture import mixture, sample
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.module import substitute
from xscale.nn.tokens import Stats

DENSE = {"kind": "dense", "hidden": 10, "activation": "relu"}
EXPERTS = {
    "gated": {"kind": "gated", "hidden": 8, "gate": "geglu_tanh"},
    "gated with biases": {"kind": "gated", "hidden": 32, "bias": True},
    "clamped": {"kind": "gated", "hidden": 32, "gate": "quick_geglu", "clamp_value": 0.2, "linear_offset": 1.0},
    "dense": {**DENSE, "bias": True},
}
ROUTED: dict[str, dict[str, Any]] = {name: {"router": name} for name in ROUTERS.able(choice="token")}
CASES: dict[str, dict[str, Any]] = (
    ROUTED
    | {f"topk, {name}": {"expert": expert} for name, expert in EXPERTS.items()}
    | {"topk, biased logits": {"router": {"kind": "topk", "logit_bias": True}}}
    | {"capacity": {"capacity_factor": 0.5}, "shared": {"shared": DENSE, "shared_combine": "gate"}}
)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_one_token_is_as_several(name: str) -> None:
    part = mixture(**CASES[name]).eval()
    for index, parameter in enumerate(part.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    x, tokens = sample(rows=1, length=1, cache={})
    assert part._has_shortcut(x[0], tokens)
    watched = tokens.with_forward(stats=Stats())
    assert not part._has_shortcut(x[0], watched)
    torch.testing.assert_close(part(x, tokens), part(x, watched), rtol=1e-12, atol=1e-12)


def test_training_and_a_substitute_take_the_other_path() -> None:
    part = mixture()
    x, tokens = sample(rows=1, length=1, cache={})
    assert not part._has_shortcut(x[0], tokens)
    with torch.no_grad():
        assert part._has_shortcut(x[0], tokens)
        assert not part._has_shortcut(x[0], tokens.with_forward(cache=None))
        substitute(part, "dispatch", lambda rows, counts, experts: experts(rows, counts))
        assert not part._has_shortcut(x[0], tokens)
