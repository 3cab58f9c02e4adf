"""Collaborative attention against the paper's equation, one head at a time, its limit and its generation."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from tests.nn.position.test_scores import EQUATIONS
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.collaborative import Collaborative
from xscale.nn.position.deberta import Deberta
from xscale.nn.position.shaw import Shaw
from xscale.nn.tokens import Tokens

LENGTH, HEADS = 12, 4
K = WIDTH // HEADS


def mixer(shared_width: int | None, **changes: Any) -> Collaborative:
    config, around = Collaborative.Config(heads=HEADS, shared_width=shared_width), dims(length=LENGTH, **changes)
    assert Collaborative.check(config, around, "mixer") == []
    return ready(Collaborative(config, around))


@pytest.mark.parametrize("shared_width", [None, 12, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool, shared_width: int | None) -> None:
    """head_h = softmax(x W_q diag(m_h) (x W_k)^T / sqrt(K)) x W_v_h; fewer and more channels than a head's values."""
    part, x = mixer(shared_width, causal=causal), drawn(2, LENGTH, WIDTH).requires_grad_()
    documents = torch.tensor([[0] * 12, [0] * 5 + [1] * 7])
    shown = (
        (documents[:, :, None] == documents[:, None]).tril() if causal else documents[:, :, None] == documents[:, None]
    )
    heads = []
    for h in range(HEADS):
        queries = x @ part.shared_q.weight.mT @ torch.diag(part.mixing[h])
        keys, values = x @ part.shared_k.weight.mT, x @ part.v.weight[h * K : (h + 1) * K].mT
        scores = torch.einsum("btc,bsc->bts", queries, keys) / math.sqrt(K)
        heads.append(scores.masked_fill(~shown, float("-inf")).softmax(-1) @ values)
    wanted = torch.cat(heads, -1) @ part.o.weight.mT
    out = part(x, tokens(LENGTH, documents=documents))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


def test_heads_with_channels_of_their_own_are_multi_head_attention() -> None:
    part, plain = mixer(None), ready(Attention(Attention.Config(heads=HEADS), dims(length=LENGTH)))
    assert plain.k is not None
    with torch.no_grad():
        part.mixing.copy_(torch.eye(HEADS).repeat_interleave(K, 1))
        for shared, own in ((part.shared_q, plain.q), (part.shared_k, plain.k), (part.v, plain.v), (part.o, plain.o)):
            shared.weight.copy_(own.weight)
    x = drawn(2, LENGTH, WIDTH)
    assert close(part(x, tokens(LENGTH)), plain(x, tokens(LENGTH)))


@pytest.mark.parametrize(
    ("position", "shared_width"),
    [
        ({"kind": "shaw", "distance": 3, "values": False}, 12),
        ({"kind": "music_transformer"}, 12),
        ({"kind": "transformer_xl"}, 8),
    ],
)
def test_positions_add_terms_that_read_the_weighed_queries(position: dict[str, Any], shared_width: int) -> None:
    """The terms of the positions' own papers, of each head's queries x W_q diag(m_h) and the shared keys."""
    settings = {"heads": HEADS, "shared_width": shared_width, "position": position}
    config, around = decode(Collaborative.Config, settings), dims(length=LENGTH)
    assert Collaborative.check(config, around, "mixer") == []
    part, x = ready(Collaborative(config, around)), drawn(2, LENGTH, WIDTH).requires_grad_()
    score = EQUATIONS[part.position.Config.kind]
    queries, keys = x @ part.shared_q.weight.mT, x @ part.shared_k.weight.mT
    values = (x @ part.v.weight.mT).unflatten(-1, (HEADS, K))
    rows = []
    for b, t, h in itertools.product(range(2), range(LENGTH), range(HEADS)):
        q = queries[b, t] * part.mixing[h]
        scores = [score(part, q, keys[b, s], h, s - t) / math.sqrt(K) for s in range(t + 1)]
        rows.append(torch.stack(scores).softmax(0) @ values[b, : t + 1, h])
    wanted = torch.stack(rows).view(2, LENGTH, -1) @ part.o.weight.mT
    out = part(x, tokens(LENGTH))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for gradient, literal in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(gradient, literal)
        assert gradient.any()
    cache: dict[str, Any] = {}
    for first, last in ((0, 5), (5, 6), (6, LENGTH)):
        ids, positions = tokens(LENGTH).ids[:, first:last], torch.arange(first, last).expand(2, -1)
        assert close(part(x[:, first:last], Tokens(ids, positions, forward=Forward(cache=cache))), out[:, first:last])


def test_generation_caches_the_shared_keys_once() -> None:
    part, cache = mixer(8), {}
    part(drawn(2, LENGTH, WIDTH), tokens(LENGTH, cache=cache))
    k, v = cache[part.path].append(torch.zeros(2, 1, 1, 8).double(), torch.zeros(2, HEADS, 1, K).double())
    assert (k.shape[1], v.shape[1]) == (1, HEADS)


def test_bad_settings_are_refused_with_what_would_work() -> None:
    (problem,) = Collaborative.check(Collaborative.Config(heads=5), dims(), "mixer")
    assert str(problem).startswith("mixer.heads: heads=5 does not divide width=32")
    config = Collaborative.Config(heads=4, position=Deberta.Config())
    (problem,) = Collaborative.check(config, dims(), "mixer")
    assert str(problem).startswith("mixer.position: position 'deberta' projects its table")
    assert "Take mixer.position.kind=rope, alibi, " in str(problem)
    assert "deberta" not in str(problem).split("Take")[1]
    config = Collaborative.Config(heads=4, position=Shaw.Config())
    (problem,) = Collaborative.check(config, dims(), "mixer")
    assert str(problem).startswith("mixer.position: position 'shaw' adds to values")
    assert "Take mixer.position.kind=rope, " in str(problem)
