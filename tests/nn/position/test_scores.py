"""Positions that read queries and keys, against their papers' equations written pair by pair."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.nn.dims import Dims
from xscale.nn.forward import Forward
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mla import Mla
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.shaw import Shaw
from xscale.nn.tokens import Tokens
from xscale.parallel.precision.precision import apply

WIDTH, HEADS, HEAD_WIDTH = 32, 4, 8
Score = Callable[[Attention, Tensor, Tensor, int, int], Tensor]
"""Mixer, query, key, head and distance key - query -> the score before its factor."""


def shaw_row(part: Any, distance: int) -> int:
    return max(-part.distance, min(part.distance, distance)) + part.distance


def shaw(mixer: Any, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
    return q @ (k + mixer.position.key_table[shaw_row(mixer.position, distance)])


def music_transformer(mixer: Any, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
    return q @ (k + mixer.position.table[head, distance + mixer.position.length - 1])


def transformer_xl(mixer: Any, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
    part = mixer.position
    rates = [10000 ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)]
    r = [math.sin(-distance * rate) for rate in rates] + [math.cos(-distance * rate) for rate in rates]
    w = part.weight.view(HEADS, HEAD_WIDTH, WIDTH)[head] @ torch.tensor(r, dtype=q.dtype)
    u, v = part.content_bias[head], part.position_bias[head]
    return q @ k + q @ w + u @ k + v @ w


def deberta(mixer: Any, q: Tensor, k: Tensor, head: int, distance: int) -> Tensor:
    part, ahead = mixer.position, -distance
    if part.buckets is not None and abs(ahead) > part.buckets // 2:
        half = part.buckets // 2
        growth = math.log(abs(ahead) / half) / math.log((part.distance - 1) / half)
        # Rounded up, but not for what single precision has too much.
        ahead = int(math.copysign(math.ceil(growth * (half - 1) - 1e-6) + half, ahead))
    row = part.table[max(0, min(2 * part.rows - 1, ahead + part.rows))]
    row = row if part.norm is None else part.norm(row)
    group = head * mixer.k.weight.shape[0] // mixer.q.weight.shape[0]
    query, key = mixer.q(row).view(-1, HEAD_WIDTH)[head], mixer.k(row).view(-1, HEAD_WIDTH)[group]
    return q @ k + q @ key + k @ query


EQUATIONS: dict[str, Score] = {
    "shaw": shaw,
    "music_transformer": music_transformer,
    "transformer_xl": transformer_xl,
    "deberta": deberta,
}
POSITIONS = [
    {"kind": "shaw", "distance": 3},
    {"kind": "shaw", "distance": 40, "values": False},
    {"kind": "music_transformer"},
    {"kind": "transformer_xl"},
    {"kind": "deberta", "buckets": 4, "distance": 8, "norm": {"kind": "layer"}},
    {"kind": "deberta", "buckets": None, "distance": 5},
]


def network(position: dict[str, Any], causal: bool = True, length: int = 24, **changes: Any) -> Attention:
    sizes = dims(causal=causal, length=length)
    config = decode(Attention.Config, {"heads": HEADS, "position": position, **changes})
    assert Attention.check(config, sizes, "mixer") == []
    return ready(Attention(config, sizes))


def sparsemax(scores: Tensor) -> Tensor:
    """Weights of scores [N] by Martins and Astudillo 2016, algorithm 1: entmax of alpha = 2."""
    ordered = scores.sort(descending=True).values
    count = max(k for k in range(1, len(scores) + 1) if 1 + k * ordered[k - 1] > ordered[:k].sum())
    return (scores - (ordered[:count].sum() - 1) / count).clamp(min=0)


def literal(
    mixer: Attention,
    x: Tensor,
    documents: Tensor,
    scale: float | None = None,
    weigh: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(0),
) -> Tensor:
    """softmax and sum of values pair by pair; heads share keys in order."""
    part: Any = mixer.position
    score = EQUATIONS[part.Config.kind]
    scale = scale or ((3 if part.Config.kind == "deberta" else 1) * HEAD_WIDTH) ** -0.5
    assert mixer.k is not None
    q, k, v = (y.unflatten(-1, (-1, HEAD_WIDTH)) for y in (mixer.q(x), mixer.k(x), mixer.v(x)))
    shared = HEADS // k.shape[2]
    rows = []
    for b in range(len(x)):
        for i in range(x.shape[1]):
            for head in range(HEADS):
                group, seen = head // shared, range(i + 1 if mixer.causal else x.shape[1])
                seen = [j for j in seen if documents[b, i] == documents[b, j]]
                scores = [scale * score(mixer, q[b, i, head], k[b, j, group], head, j - i) for j in seen]
                weights = weigh(torch.stack(scores))
                total = sum(weight * v[b, j, group] for weight, j in zip(weights, seen, strict=True))
                if part.adds_values:
                    tables = [part.value_table[shaw_row(part, j - i)] for j in seen]
                    total = total + sum(weight * row for weight, row in zip(weights, tables, strict=True))
                rows.append(total)
    return mixer.o(torch.stack(rows).view(len(x), x.shape[1], -1))


def at(length: int, documents: Tensor | None = None, **more: Any) -> Tokens:
    return Tokens.from_ids(torch.zeros(2, length, dtype=torch.long), documents, **more)


def agree(mixer: Attention, lengths: tuple[int, ...], **scale: float) -> bool:
    """The same output, and the same gradients of every parameter."""
    documents = numbered(*lengths)
    x = drawn(2, sum(lengths), WIDTH)
    parameters = list(mixer.parameters())
    slopes = drawn(*x.shape, seed=5)
    outs = mixer(x, at(x.shape[1], documents if len(lengths) > 1 else None)), literal(mixer, x, documents, **scale)
    gradients = [torch.autograd.grad((out * slopes).sum(), parameters) for out in outs]
    assert all(bool(gradient.any()) for gradient in gradients[0])
    return close(*outs) and all(close(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))
@pytest.mark.sampled(2)
def test_scores_are_the_papers_equation(position: dict[str, Any], causal: bool) -> None:
    mixer = network(position, causal)
    assert agree(mixer, (11,))
    assert agree(mixer, (4, 1, 6)), "documents"
    assert agree(network(position, causal, kv_heads=2), (9,)), "grouped queries"
    assert agree(network(position, causal, scale=0.2), (7,), scale=0.2), "another scale"


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))
def test_decoding_equals_the_parallel_form(position: dict[str, Any]) -> None:
    mixer, x = network(position), drawn(2, 24, WIDTH)
    whole, cache = mixer(x, at(24)), dict[str, Any]()
    for start, end in ((0, 9), (9, 10), (10, 15), *((step, step + 1) for step in range(15, 24))):
        tokens = Tokens(at(24).ids[:, start:end], at(24).positions[:, start:end], forward=Forward(cache=cache))
        assert close(mixer(x[:, start:end], tokens), whole[:, start:end])


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))
def test_split_heads_have_the_same_terms(position: dict[str, Any]) -> None:
    mixer, x = network(position, core={"kind": "split_heads", "cores": [{"kind": "softmax"}] * 2}), drawn(2, 20, WIDTH)
    plain = network(position)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            mixer.get_parameter(name).copy_(parameter)
    torch.testing.assert_close(mixer(x, at(20)), plain(x, at(20)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))
def test_entmax_has_the_same_terms(position: dict[str, Any]) -> None:
    mixer, x = network(position, core={"kind": "entmax"}), drawn(2, 9, WIDTH)
    with torch.no_grad():
        for parameter in mixer.core.parameters():
            parameter.fill_(40.0)  # sigmoid(a) = 1
    wanted = literal(mixer, x, torch.zeros(2, 9), weigh=sparsemax)
    torch.testing.assert_close(mixer(x, at(9)), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: "-".join(map(str, position.values())))
def test_bfloat16_is_near(position: dict[str, Any]) -> None:
    mixer, x = network(position), drawn(2, 20, WIDTH)
    wanted = mixer(x, at(20))
    apply(mixer, torch.bfloat16, torch.float32)
    found = mixer(x.bfloat16(), at(20))
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


def test_shaw_with_tables_of_zeros_is_plain() -> None:
    mixer, plain, x = network({"kind": "shaw"}), network({"kind": "none"}), drawn(2, 24, WIDTH)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            mixer.get_parameter(name).copy_(parameter)
    assert isinstance(mixer.position, Shaw)
    assert not close(mixer(x, at(24)), plain(x, at(24)))
    torch.nn.init.zeros_(mixer.position.key_table)
    assert not close(mixer(x, at(24)), plain(x, at(24))), "the values' table counts alone"
    torch.nn.init.zeros_(mixer.position.value_table)
    assert close(mixer(x, at(24)), plain(x, at(24)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 6), (3, 7), (70, 70)])
def test_a_shift_puts_distances_at_their_pairs(queries: int, keys: int, causal: bool) -> None:
    pairs = Pairs(queries, keys, keys - queries, causal)
    distances = pairs.distances(torch.device("cpu"))
    wanted = torch.arange(keys) - torch.arange(queries)[:, None] - pairs.offset
    read = wanted <= 0 if causal else torch.ones_like(wanted, dtype=torch.bool)
    shifted = pairs.shift(distances.repeat(2, queries, 1))
    assert torch.equal(shifted[:, read], wanted[read].expand(2, -1))
    weights = drawn(2, queries, keys) * read
    assert torch.equal(pairs.shift(pairs.unshift(weights))[:, read], weights[:, read])
    assert close(pairs.unshift(weights).sum((0, 1)) @ distances.double(), (weights * wanted).sum())


def test_no_tensor_has_a_row_for_each_pair() -> None:
    """The largest tensor that autograd keeps has a number for each head, query and distance."""
    length, kept = 150, []
    for position in POSITIONS:
        mixer = network(position, length=length)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            mixer(drawn(1, length, WIDTH), Tokens.from_ids(torch.zeros(1, length, dtype=torch.long)))
    assert HEADS * length * length <= max(kept) <= HEADS * length * (length + 1)


@pytest.mark.parametrize("kind", list(EQUATIONS))
def test_a_core_without_scores_is_refused(kind: str) -> None:
    config = decode(Attention.Config, {"heads": 4, "position": {"kind": kind}, "core": {"kind": "linear"}})
    problems = [str(problem) for problem in Attention.check(config, dims(), "mixer")]
    assert any(f"'linear' has no scores for position '{kind}'" in problem for problem in problems)
    assert any("Take mixer.core.kind=softmax, adaptive_span, " in problem for problem in problems)
    config = decode(Mla.Config, {"heads": 4, "position": {"kind": kind}})
    assert any("reads whole queries" in str(problem) for problem in Mla.check(config, dims(), "mixer"))


@pytest.mark.parametrize("kind", list(EQUATIONS))
def test_cross_attention_has_no_position(kind: str) -> None:
    around = Dims(width=32, depth=1, vocabulary=9, length=24, causal=True, cross=True)
    config = decode(Attention.Config, {"heads": 4, "position": {"kind": kind}})
    assert Attention(config, around).position is None
