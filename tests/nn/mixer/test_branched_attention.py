"""Branched attention against the paper's equation, one branch at a time."""

import math
from typing import Any

import pytest
import torch

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.mixer.branched_attention import BranchedAttention

LENGTH, HEADS, HIDDEN = 12, 4, 5
K = WIDTH // HEADS


def mixer(config: dict[str, Any] | None = None, **changes: Any) -> BranchedAttention:
    made = BranchedAttention.Config(heads=HEADS, **{"hidden": HIDDEN, **(config or {})})
    around = dims(length=LENGTH, **changes)
    assert BranchedAttention.check(made, around, "mixer") == []
    return ready(BranchedAttention(made, around))


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_papers_sum_of_branches(bias: bool, cross: bool) -> None:
    """y = sum_i alpha_i FFN_i(kappa_i head_i W_i^O)."""
    part: Any = mixer({"ffn_bias": bias}, cross=cross)
    x, memory = drawn(2, LENGTH, WIDTH).requires_grad_(), drawn(2, 7, WIDTH, seed=1).requires_grad_()
    read = memory if cross else x
    shown = torch.ones(LENGTH, 7, dtype=torch.bool) if cross else torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    y = torch.zeros_like(x)
    for i in range(HEADS):
        rows = slice(i * K, (i + 1) * K)
        q, k, v = (z @ w.weight[rows].T for z, w in ((x, part.q), (read, part.k), (read, part.v)))
        scores = (q @ k.mT / math.sqrt(K)).masked_fill(~shown, float("-inf"))
        head = part.kappa.weight[i] * (scores.softmax(-1) @ v @ part.o.weight[:, rows].T)
        inner = head @ part.branches.up[i].T
        inner = inner + part.branches.up_bias[i] if bias else inner
        outer = torch.clamp(inner, min=0) @ part.branches.down[i].T
        outer = outer + part.branches.down_bias[i] if bias else outer
        y = y + part.alpha.weight[i] * outer
    given = (memory, tokens(7)) if cross else ()
    out = part(x, tokens(LENGTH), *given)
    assert close(out, y)
    above, leaves = drawn(*out.shape, seed=3), [x, *([memory] if cross else []), *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((z * above).sum(), leaves) for z in (out, y)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


def test_all_branches_have_together_the_hidden_units_of_a_usual_ffn() -> None:
    part = mixer({"hidden": None})
    assert part.branches.up.shape == (HEADS, 4 * WIDTH // HEADS, WIDTH)
    assert [simplex.weight.shape for simplex in (part.kappa, part.alpha)] == [(HEADS,), (HEADS,)]


def test_an_output_bias_is_refused() -> None:
    (problem,) = BranchedAttention.check(BranchedAttention.Config(heads=4, output_bias=True), dims(), "mixer")
    assert str(problem).startswith("mixer.output_bias: a head's output enters its branch without a bias.")
    assert BranchedAttention.check(BranchedAttention.Config(heads=4, bias=True), dims(), "mixer") == []
