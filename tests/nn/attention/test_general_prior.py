"""Priors merged with scores against the survey's general form, one pair of tokens at a time, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import HEAD_WIDTH, HEADS, WIDTH, close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.attention.general_prior import GeneralPrior
from xscale.nn.attention.ops.mask import AttentionMask, ScoreEdge
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.prior_only import PriorOnly
from xscale.nn.position.alibi import Alibi
from xscale.nn.position.rope import Rope

LENGTH = 9


def softmax(scores: list[Tensor]) -> Tensor:
    powers = torch.stack(scores).exp()
    return powers / powers.sum()


def literal(q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor, causal: bool, factors: Any, merge: str) -> Tensor:
    """One sample and head: q, k, v [T, K], the bias b and the previous scores s [T, T]."""
    own, prior, previous, gate = factors
    rows = []
    for i in range(LENGTH):
        seen = range(i + 1 if causal else LENGTH)
        mine = [own * (q[i] @ k[j]) / math.sqrt(HEAD_WIDTH) for j in seen]
        given = [prior * b[i, j] + previous * s[i, j] for j in seen]
        if merge == "add":
            # The density exp(P) times the distribution softmax(S), normalised.
            product = softmax(mine) * torch.stack(given).exp()
            weights = product / product.sum()
        elif merge == "multiply":
            weights = softmax([x * y for x, y in zip(mine, given, strict=True)])
        else:
            weights = (1 - gate) * softmax(mine) + gate * softmax(given)
        rows.append(sum(weight * v[j] for weight, j in zip(weights, seen, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("merge", ["add", "multiply", "mix"])
def test_a_merge_is_its_equation(merge: str, causal: bool, learned: bool) -> None:
    given = {"merge": merge, "own": 0.7, "prior": 1.3, "previous": 0.4, "gate": 0.3, "learned": learned}
    part = ready(GeneralPrior(decode(GeneralPrior.Config, given), dims(causal=causal, layer=1), HEADS, HEAD_WIDTH))
    factors: Any = (0.7, 1.3, 0.4, 0.3)
    if learned:
        names = ("own_factor", "prior_factor", "previous_factor", *["gate_factor"] * (merge == "mix"))
        assert {name for name, _ in part.named_parameters()} == set(names)
        factors = [getattr(part, name) for name in names] + [0.3] * (merge != "mix")
        factors[3] = torch.sigmoid(factors[3]) if merge == "mix" else 0.3
    q, k, v = (drawn(1, HEADS, LENGTH, HEAD_WIDTH, seed=at).requires_grad_() for at in range(3))
    bias, previous = (drawn(1, HEADS, LENGTH, LENGTH, seed=at).requires_grad_() for at in (5, 6))
    edge = ScoreEdge(previous)
    out = part(q, k, v, AttentionMask(LENGTH, LENGTH, causal, bias=bias, score_edge=edge))
    heads = [
        literal(q[0, h], k[0, h], v[0, h], bias[0, h], previous[0, h], causal, factors, merge) for h in range(HEADS)
    ]
    wanted = torch.stack(heads)[None]
    assert close(out, wanted)
    assert edge.scores is not None
    leaves = [q, k, v, bias, previous, *part.parameters()]
    above = drawn(*out.shape, seed=8)
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("merge", ["add", "multiply", "mix"])
@pytest.mark.parametrize("position", ["alibi", "relative", "gaussian", "tupe", "shaw", "transformer_xl", "deberta"])
def test_any_position_generates_a_prior(position: str, merge: str) -> None:
    """The mixer of every generator, causal, has gradients everywhere and leaks nothing."""
    config = decode(
        Attention.Config, {"heads": HEADS, "position": position, "core": {"kind": "general_prior", "merge": merge}}
    )
    around = dims(length=LENGTH)
    assert Attention.check(config, around, "mixer") == []
    part, x = ready(Attention(config, around)), drawn(2, LENGTH, WIDTH)
    out = part(x, tokens(LENGTH))
    out.square().sum().backward()
    # The first token of a causal model sees itself alone, whatever its scores are.
    read = {name: parameter.grad for name, parameter in part.named_parameters() if not name.endswith("from_cls")}
    assert [name for name, gradient in read.items() if gradient is None or not gradient.any()] == []
    later = torch.cat((x[:, :5], drawn(2, LENGTH - 5, WIDTH, seed=4)), 1)
    assert close(part(later, tokens(LENGTH))[:, :5], out[:, :5])
    assert not close(part(later, tokens(LENGTH))[:, 5:], out[:, 5:])


@pytest.mark.parametrize("position", ["alibi", "relative", "gaussian", "tupe"])
def test_a_prior_alone_is_its_equation(position: str) -> None:
    config, around = decode(PriorOnly.Config, {"heads": HEADS, "generator": position}), dims(length=LENGTH)
    assert PriorOnly.check(config, around, "mixer") == []
    part, x = ready(PriorOnly(config, around)), drawn(1, LENGTH, WIDTH)
    places = torch.arange(LENGTH)[None]
    bias = part.generator.bias(places, places)
    assert bias is not None
    bias = bias.double()
    heads = []
    for h in range(HEADS):
        v = x[0] @ part.v.weight[h * HEAD_WIDTH : (h + 1) * HEAD_WIDTH].mT
        rows = [softmax([bias[0, h, i, j] for j in range(i + 1)]) @ v[: i + 1] for i in range(LENGTH)]
        heads.append(torch.stack(rows))
    assert close(part(x, tokens(LENGTH, batch=1))[0], torch.cat(heads, -1) @ part.o.weight.mT)


def test_what_has_no_prior_is_refused_with_what_would_work() -> None:
    def problem(around: Dims, **core: Any) -> str:
        config = decode(Attention.Config, {"heads": HEADS, "core": {"kind": "general_prior", **core}})
        (problem,) = Attention.check(config, around, "mixer")
        return str(problem)

    said = problem(dims(position=Rope.Config()))
    assert said.startswith("mixer.core: has no generator of a prior: position 'rope' adds nothing to scores")
    assert "Take mixer.core.previous=1.0, or model.position.kind=alibi, " in said
    assert "prior is 0" in problem(dims(position=Alibi.Config()), prior=0.0)
    assert "cross-attention has no position" in problem(dims(cross=True, position=Alibi.Config()))
    (refused,) = PriorOnly.check(decode(PriorOnly.Config, {"generator": "shaw"}), dims(), "mixer")
    assert "mixer.generator: position 'shaw' adds no bias that positions alone determine" in str(refused)
