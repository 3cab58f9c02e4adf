"""Hash layers: the same id, the same expert; and nothing crosses a document or needs more than the cache holds."""

from typing import Any

import pytest
import torch

from tests.nn.moe.mixture import D, V, router, sample
from xscale.core.errors import ConfigError
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims
from xscale.nn.forward import Forward
from xscale.nn.post_step import WeightWriter
from xscale.nn.tokens import Tokens

FUNCTIONS = ["random", "balanced", "rolled", "bigram", "previous", "position"]


def hash_router(function: str, experts: int = 4, **data: Any) -> Router:
    """With the counts of some data, if it needs them."""
    part = router("hash", experts, function=function, **data)
    if part.reads_token_counts:
        part.set_token_counts([(7 * token) % V for token in range(V)], WeightWriter())
    return part


@pytest.mark.parametrize("function", FUNCTIONS)
def test_depends_on_what_it_says(function: str) -> None:
    x, tokens = sample(rows=8)
    part = hash_router(function)
    ids, positions = tokens.ids, tokens.positions
    before = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], 1)
    keys = {"bigram": (ids, before), "previous": (before,), "position": (positions,)}.get(function, (ids,))
    experts = part(x.flatten(0, 1), tokens).expert
    seen: dict[tuple[int, ...], int] = {}
    for one, expert in enumerate(experts.tolist()):
        key = tuple(int(each.flatten()[one]) for each in keys)
        assert seen.setdefault(key, expert) == expert
    assert len(set(seen.values())) == 4


def test_balanced_takes_frequencies() -> None:
    x, tokens = sample()
    heavy = tuple(100.0 if token == 7 else 1.0 for token in range(V))
    table = router("hash", function="balanced", frequencies=heavy).fixed_table[0]
    assert (table == table[7]).sum() == 1, "one id that comes more often than all others has an expert for itself"
    tokens = Tokens.from_ids(torch.full((1, 4), 7))
    routing = router("hash", function="balanced", frequencies=heavy)(x[:1, :4].flatten(0, 1), tokens)
    assert set(routing.expert.tolist()) == {int(table[7])}


def test_balanced_without_counts_is_refused() -> None:
    x, tokens = sample()
    with pytest.raises(ConfigError, match="follows the counts of the ids in the training data"):
        router("hash", function="balanced")(x.flatten(0, 1), tokens)


def test_the_counts_of_the_data_give_the_table_of_the_same_frequencies() -> None:
    x, tokens = sample()
    counts = [float((5 * token) % 11) for token in range(V)]
    part, same = (router("hash", 8, function="balanced", hashes=2, **keys) for keys in ({}, {"frequencies": counts}))
    part.set_token_counts(counts, WeightWriter())
    assert torch.equal(part(x.flatten(0, 1), tokens).expert, same(x.flatten(0, 1), tokens).expert)


def test_several_hashes_use_pools_of_their_own() -> None:
    x, tokens = sample()
    routing = router("hash", 8, hashes=2)(x.flatten(0, 1), tokens)
    first, second = routing.expert.view(2, -1)
    assert first.max() < 4 <= second.min()
    assert not torch.equal(first, second - 4), "two hash functions, not one twice"
    assert (routing.weight == 1).all()


@pytest.mark.parametrize("function", ["bigram", "previous"])
def test_documents_and_generation(function: str) -> None:
    x, tokens = sample(rows=1)
    part = router("hash", 16, function=function)
    whole = part(x.flatten(0, 1), tokens).expert
    documents = torch.tensor([[0] * 10 + [1] * 14])
    packed = part(x.flatten(0, 1), Tokens.from_ids(tokens.ids, documents)).expert
    apart = part(x[:, 10:].flatten(0, 1), Tokens.from_ids(tokens.ids[:, 10:])).expert
    assert torch.equal(packed[10:], apart)
    cache: dict[str, object] = {}
    steps = [
        part(
            x[0, at : at + 1],
            Tokens(tokens.ids[:, at : at + 1], tokens.positions[:, at : at + 1], forward=Forward(cache=cache)),
        ).expert
        for at in range(24)
    ]
    assert torch.equal(torch.cat(steps), whole)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_seeds_differ(function: str) -> None:
    x, tokens = sample()
    one, two = (hash_router(function, seed=seed)(x.flatten(0, 1), tokens).expert for seed in (0, 1))
    assert not torch.equal(one, two)


def test_rolled_gives_every_id_another_expert_for_as_many_seeds_as_there_are_experts() -> None:
    x, _ = sample()
    tokens = Tokens.from_ids(torch.arange(8).view(1, 8))
    rows = [
        router("hash", 4, function="rolled", seed=seed)(x[:1, :8].flatten(0, 1), tokens).expert for seed in range(4)
    ]
    assert rows[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert torch.stack(rows).sort(0).values.eq(torch.arange(4)[:, None]).all()


def test_what_is_refused() -> None:
    part, sizes = ROUTERS.get("hash").part, RouterDims(D, 8, V, 1, None)
    refused = [
        part.Config(hashes=3),
        part.Config(frequencies=(1.0,) * V),
        part.Config(function="balanced", frequencies=(1.0,)),
    ]
    for config in refused:
        (problem,) = part.check(config, sizes, "router")
        assert problem.advice
    assert not part.check(part.Config(function="balanced", frequencies=(1.0,) * V), sizes, "router")
