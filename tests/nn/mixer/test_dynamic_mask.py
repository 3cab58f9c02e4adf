"""Dynamic mask attention against the paper's equations, one query at a time, and its limit."""

import math

import pytest
import torch

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.dynamic_mask import DynamicMask

LENGTH, HEADS = 16, 4


def mixer(causal: bool, length: int = LENGTH) -> DynamicMask:
    return ready(DynamicMask(DynamicMask.Config(heads=HEADS), dims(length=length, causal=causal)))


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool) -> None:
    # A table shorter than the sequence: the farthest distances share a row.
    part, x = mixer(causal, 12), drawn(2, LENGTH, WIDTH).requires_grad_()
    documents = torch.tensor([[0] * 16, [0] * 10 + [1] * 6])
    assert part.k is not None
    q, k, v = ((x @ linear.weight.mT).unflatten(-1, (HEADS, -1)) for linear in (part.q, part.k, part.v))
    before, after = part.distance_table
    outs = []
    for b in range(2):
        for t in range(LENGTH):
            keys = [s for s in range(LENGTH) if documents[b, s] == documents[b, t] and (s <= t or not causal)]
            for h in range(HEADS):
                terms = []
                for s in keys:
                    distance = 0.0 if s == t else before[min(t - s, 12) - 1] if s < t else after[min(s - t, 12) - 1]
                    logit = x[b, t] @ part.token_weight + distance + part.head_bias[h]
                    mask = 1 / (1 + torch.exp(-logit))
                    terms.append(mask * torch.exp(q[b, t, h] @ k[b, s, h] / math.sqrt(WIDTH / HEADS)))
                weights = torch.stack(terms)
                outs.append((weights / weights.sum()) @ v[b, keys, h])
    wanted = torch.stack(outs).view(2, LENGTH, -1) @ part.o.weight.mT
    out = part(x, tokens(LENGTH, documents=documents))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


@pytest.mark.parametrize("causal", [True, False])
def test_an_open_mask_is_softmax_attention(causal: bool) -> None:
    part, x = mixer(causal), drawn(2, LENGTH, WIDTH)
    with torch.no_grad():
        part.head_bias.fill_(1000.0)
    plain = ready(Attention(Attention.Config(heads=HEADS), dims(length=LENGTH, causal=causal)))
    plain.load_state_dict(
        {name: value for name, value in part.state_dict().items() if name.endswith("weight") and "." in name}
    )
    assert close(part(x, tokens(LENGTH)), plain(x, tokens(LENGTH)))


def test_the_mask_differs_by_direction() -> None:
    part, x = mixer(False), drawn(1, LENGTH, WIDTH)
    before = part(x, tokens(LENGTH, batch=1))
    with torch.no_grad():
        part.distance_table[1].fill_(-1e4)
    ahead = part(x, tokens(LENGTH, batch=1))
    assert not close(ahead[:, 0], before[:, 0])
    assert close(ahead[:, -1], before[:, -1]), "the last token has none after it"
