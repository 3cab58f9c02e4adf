"""Adaptive spans against the paper's equations, one weight at a time, with their limits and their loss."""

from dataclasses import replace
from typing import Any

import pydantic
import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import HEADS, agree, build, drawn, inputs, masks
from xscale.nn.attention.adaptive_span import AdaptiveSpan, clamp_inward
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims

S, R = 20, 6.0
SPANS = (0.0, 0.12, 0.5, 1.0)
"""Fractions of S, at both ends and between."""


def spanned(**settings: Any) -> Any:
    return AdaptiveSpan.Config(max_span=S, ramp=R, **settings)


def built(causal: bool, fractions: tuple[float, ...] = SPANS, **settings: Any) -> Core:
    core = build(spanned(**settings), causal=causal)
    with torch.no_grad():
        core.span.copy_(torch.tensor(fractions))
    return core


def attended(core: Core, mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """a_ij = m_z(|i - j|) exp(s_ij) / sum_q m_z(|i - q|) exp(s_iq), the mask as the paper has it."""
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
    rows = []
    for h in range(q.shape[1]):
        z = S * core.span[h]
        for t in range(q.shape[2]):
            terms = []
            for s in range(k.shape[2]):
                x = abs(t + mask.offset - s)
                soft = torch.minimum(torch.maximum((R + z - x) / R, torch.tensor(0.0)), torch.tensor(1.0))
                terms.append(soft * scores[:, h, t, s].exp() * seen[:, 0, t, s])
            weights = torch.stack(terms, -1)
            rows.append(torch.einsum("bs,bsk->bk", weights / weights.sum(-1, keepdim=True), v[:, h]))
    return torch.stack(rows, 1).unflatten(1, (q.shape[1], -1))


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool) -> None:
    # Away from the ends of fractions and ramps, where there are two gradients.
    core = built(causal, (0.03, 0.12, 0.51, 0.97))
    for mask in masks(30, causal=causal):
        agree(core, mask, lambda *x, mask=mask: attended(core, mask, *x))


@pytest.mark.parametrize("causal", [True, False])
def test_the_longest_spans_are_softmax_attention(causal: bool) -> None:
    core, plain = built(causal, (1.0,) * HEADS), build(Softmax.Config(), causal=causal)
    for mask in masks(S + 1, causal=causal, documents=False):
        q, k, v = inputs(mask.queries, mask.keys)
        torch.testing.assert_close(core(q, k, v, mask), plain(q, k, v, mask), rtol=1e-12, atol=1e-12)
    q, k, v = inputs(40)
    mask = AttentionMask(40, 40, causal)
    assert not torch.allclose(core(q, k, v, mask), plain(q, k, v, mask)), "no key is farther than S + R"


def test_nothing_is_seen_behind_the_ramp() -> None:
    core, (q, k, v) = built(True), inputs(40, groups=HEADS)
    changed = v.detach().clone()
    changed[:, :, 10] += 1
    mask = AttentionMask(40, 40, True)
    moved = (core(q, k, changed, mask) != core(q, k, v, mask)).any(-1)[0]  # [H, T]
    for h, fraction in enumerate(SPANS):
        assert moved[h].nonzero().flatten().tolist() == [t for t in range(10, 40) if t - 10 < S * fraction + R]


def test_the_loss_is_lambda_times_the_mean_span() -> None:
    core, (q, k, v) = built(True, span_loss_weight=0.3), inputs(30)
    mask = AttentionMask(30, 30, True)
    above = drawn(2, HEADS, 30, 8, seed=3)
    plain, with_loss = (
        torch.autograd.grad(core(q, k, v, replace(mask, aux_loss_weight=weight)), core.span, above)[0]
        for weight in (None, 0.25)
    )
    inside = torch.tensor([False, True, True, False])
    wanted = torch.full((HEADS,), 0.25 * 0.3 * S / HEADS, dtype=torch.float64)
    torch.testing.assert_close((with_loss - plain)[inside], wanted[inside])


def test_a_span_at_an_end_can_only_go_back() -> None:
    x = torch.tensor([-0.1, 0.0, 0.0, 0.5, 1.0, 1.0, 1.2], requires_grad=True)
    y = clamp_inward(x)
    assert y.tolist() == [0, 0, 0, 0.5, 1, 1, 1]
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]))
    assert gradient.tolist() == [0, 0, -1, 1, 0, 1, 0]


def test_bad_spans_are_refused() -> None:
    for bad in ({"max_span": 0}, {"max_span": -3}, {"ramp": 0.0}, {"initial_span": -1.0}, {"span_loss_weight": -1.0}):
        with pytest.raises(pydantic.ValidationError):
            AdaptiveSpan.Config(**bad)
    dims = Dims(width=32, depth=2, vocabulary=11, length=16, causal=True)
    (problem,) = AdaptiveSpan.check(AdaptiveSpan.Config(initial_span=17.0), dims, "core")
    assert str(problem).startswith("core.initial_span: initial_span=17.0 is longer than max_span=16")
    assert "Take 16. Lower" in str(problem)
    assert AdaptiveSpan.check(AdaptiveSpan.Config(initial_span=16.0), dims, "core") == []
