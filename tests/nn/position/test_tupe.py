"""TUPE against the paper's equation written pair by pair, and what unties [CLS]."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens

WIDTH, HEADS, HEAD_WIDTH = 32, 4, 8


def network(causal: bool = False, **position: Any) -> Attention:
    sizes = dims(causal=causal, length=24)
    config = decode(Attention.Config, {"heads": HEADS, "position": {"kind": "tupe", **position}})
    assert Attention.check(config, sizes, "mixer") == []
    return ready(Attention(config, sizes))


def at(length: int, documents: Tensor | None = None, **more: Any) -> Tokens:
    return Tokens.from_ids(torch.zeros(2, length, dtype=torch.long), documents, **more)


def literal(mixer: Any, x: Tensor, starts: list[int]) -> Tensor:
    """Equations 8 and 11 of the paper, pair by pair; `starts` has the index of each token's [CLS]."""
    part, scale = mixer.position, (2 * HEAD_WIDTH) ** -0.5
    q, k, v = (y.unflatten(-1, (-1, HEAD_WIDTH)) for y in (mixer.q(x), mixer.k(x), mixer.v(x)))
    u_query, u_key = (u.view(HEADS, HEAD_WIDTH, WIDTH) for u in (part.query_weight, part.key_weight))
    o = torch.zeros_like(q)
    for i, start in enumerate(starts):
        seen = [j for j in range(i + 1 if mixer.causal else len(starts)) if starts[j] == start]
        for head in range(HEADS):
            scores = []
            for j in seen:
                here, there = i - start, j - start
                place = scale * (u_query[head] @ part.table[here]) @ (u_key[head] @ part.table[there])
                if part.distances is not None:
                    bucket = part.distances.bucket(torch.tensor(j - i), part.distances.weight.shape[0])
                    place = place + part.distances.weight[bucket, head]
                if part.untied_cls and there == 0:
                    place = part.to_cls[head]
                if part.untied_cls and here == 0:
                    place = part.from_cls[head]
                scores.append(scale * (q[:, i, head] * k[:, j, head]).sum(-1) + place)
            weights = torch.stack(scores, -1).softmax(-1)  # [B, seen]
            o[:, i, head] = (weights[:, None] @ v[:, seen, head])[:, 0]
    return mixer.o(o.flatten(2))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("position", [{}, {"relative": False}, {"untied_cls": False}, {"buckets": 4, "distance": 6}])
def test_scores_are_the_papers_equation(position: dict[str, Any], causal: bool) -> None:
    mixer = network(causal, **position)
    for lengths in ((12,), (5, 1, 6)):
        x, slopes = drawn(2, sum(lengths), WIDTH), drawn(2, sum(lengths), WIDTH, seed=3)
        starts = [sum(lengths[:at]) for at, length in enumerate(lengths) for _ in range(length)]
        documents = numbered(*lengths) if len(lengths) > 1 else None
        outs = mixer(x, at(len(starts), documents)), literal(mixer, x, starts)
        assert close(*outs)
        parameters = list(mixer.parameters())
        gradients = [torch.autograd.grad((out * slopes).sum(), parameters) for out in outs]
        # The first token of a causal model sees itself alone.
        assert causal or all(bool(gradient.any()) for gradient in gradients[0])
        assert all(close(one, other) for one, other in zip(*gradients, strict=True))


def test_the_untied_cls_differs_only_there() -> None:
    untied, tied = network().position, network(untied_cls=False).position
    assert untied is not None
    assert tied is not None
    with torch.no_grad():
        for name, parameter in tied.named_parameters():
            parameter.copy_(untied.get_parameter(name))
    places = torch.arange(9)[None]
    one, other = untied.bias(places, places), tied.bias(places, places)
    assert one is not None
    assert other is not None
    assert torch.equal(one[:, :, 1:, 1:], other[:, :, 1:, 1:])
    assert not (one == other)[:, :, 0].any()
    assert not (one == other)[:, :, :, 0].any()
    assert torch.equal(one[0, :, 0], untied.get_parameter("from_cls")[:, None].expand(-1, 9))
    assert torch.equal(one[0, :, 1:, 0], untied.get_parameter("to_cls")[:, None].expand(-1, 8))


def test_decoding_equals_the_parallel_form() -> None:
    mixer, x = network(causal=True), drawn(2, 20, WIDTH)
    whole, cache = mixer(x, at(20)), dict[str, Any]()
    for start, end in ((0, 8), (8, 13), *((step, step + 1) for step in range(13, 20))):
        tokens = Tokens(at(20).ids[:, start:end], at(20).positions[:, start:end], forward=Forward(cache=cache))
        assert close(mixer(x[:, start:end], tokens), whole[:, start:end])


def test_a_distance_inside_the_near_buckets_is_refused() -> None:
    config = decode(Attention.Config, {"heads": 4, "position": {"kind": "tupe", "distance": 4}})
    assert "position.distance" in str(Attention.check(config, dims(), "mixer")[0])
    with pytest.raises(ConfigError, match="buckets: must be >= 4, got 2"):
        decode(Attention.Config, {"heads": 4, "position": {"kind": "tupe", "buckets": 2}})
