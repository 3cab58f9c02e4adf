"""Dynamic spans against the paper's equations, one query at a time, with their limit and their loss."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.dynamic_span import DynamicSpan

LENGTH, HEADS, S, R = 40, 4, 20, 6.0


def mixer(causal: bool = True, **settings: Any) -> DynamicSpan:
    config = DynamicSpan.Config(heads=HEADS, max_span=S, ramp=R, **settings)
    part = ready(DynamicSpan(config, dims(length=LENGTH, causal=causal)))
    with torch.no_grad():
        # Spans from a few tokens to nearly S.
        part.span_weight.mul_(2)
    return part


def spans_of(part: DynamicSpan, x: Tensor) -> Tensor:
    """z_t = S sigmoid(v^T x_t + b): [B, T, H]."""
    rows = [[S / (1 + torch.exp(-(part.span_weight @ token + part.span_bias))) for token in sample] for sample in x]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool) -> None:
    part, x = mixer(causal), drawn(2, LENGTH, WIDTH).requires_grad_()
    documents = torch.tensor([[0] * 15 + [1] * 25, [0] * 30 + [1] * 10])
    assert part.k is not None
    q, k, v = ((x @ linear.weight.mT).unflatten(-1, (HEADS, -1)) for linear in (part.q, part.k, part.v))
    spans, outs = spans_of(part, x), []
    assert spans.min() < 5
    assert spans.max() > 15
    for b in range(2):
        for t in range(LENGTH):
            keys = [s for s in range(LENGTH) if documents[b, s] == documents[b, t] and (s <= t or not causal)]
            distance = torch.tensor([abs(t - s) for s in keys])
            soft = ((R + spans[b, t, :, None] - distance) / R).clamp(0, 1)  # [H, keys]
            terms = soft * torch.exp(torch.einsum("hk,shk->hs", q[b, t], k[b, keys]) / math.sqrt(WIDTH / HEADS))
            weights = terms / terms.sum(-1, keepdim=True)
            outs.append(torch.einsum("hs,shk->hk", weights, v[b, keys]).flatten())
    wanted = torch.stack(outs).view(2, LENGTH, -1) @ part.o.weight.mT
    out = part(x, tokens(LENGTH, documents=documents))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


@pytest.mark.parametrize("causal", [True, False])
def test_the_longest_spans_are_softmax_attention(causal: bool) -> None:
    part = mixer(causal)
    with torch.no_grad():
        part.span_weight.zero_()
        part.span_bias.fill_(100.0)
    plain = ready(Attention(Attention.Config(heads=HEADS), dims(length=LENGTH, causal=causal)))
    plain.load_state_dict({name: value for name, value in part.state_dict().items() if "span" not in name})
    x = drawn(2, LENGTH, WIDTH)
    assert close(part(x[:, : S + 1], tokens(S + 1)), plain(x[:, : S + 1], tokens(S + 1)))
    assert not close(part(x, tokens(LENGTH)), plain(x, tokens(LENGTH)))


def test_the_loss_is_lambda_times_the_mean_span() -> None:
    part, x = mixer(span_loss_weight=0.3), drawn(2, LENGTH, WIDTH)
    leaves = [part.span_weight, part.span_bias]
    plain, with_loss = (
        torch.autograd.grad(part(x, tokens(LENGTH).with_forward(aux_loss_weight=weight)).sum(), leaves)
        for weight in (None, 0.25)
    )
    wanted = torch.autograd.grad(0.25 * 0.3 * spans_of(part, x).mean(), leaves)
    for before, after, extra in zip(plain, with_loss, wanted, strict=True):
        assert close(after - before, extra)
        assert extra.any()


def test_it_holds_the_core_softmax_alone() -> None:
    config = DynamicSpan.Config.model_validate({"heads": HEADS, "core": {"kind": "linear"}})
    (problem,) = DynamicSpan.check(config, dims(length=LENGTH), "mixer")
    assert str(problem).startswith("mixer.core: mixer 'dynamic_span' cannot hold the core 'linear'")
