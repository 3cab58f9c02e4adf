"""Learned tokens before the text, on layouts that send, cut and shard what holds them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Pool, distributed
from tests.parallel.against_one import alone, same
from xscale.mesh.collectives import all_reduce
from xscale.nn.tokens import Tokens
from xscale.parallel.context.heads import FirstStateOfShards
from xscale.parallel.context.sequence_sharding import SequenceSharding, shard_tokens

SECTIONS: dict[str, Any] = {"data": {"cross_documents": True}}
MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "dropout": 0.1,
    "global_tokens": 6,
    "global_mean": True,
    "stack": {
        "depth": 2,
        "block": {
            "mixer": {"kind": "attention", "heads": 4, "core": {"kind": "etc", "tokens": 6, "radius": 3}},
            "ffn": {"kind": "dense", "hidden": 48},
            "dropout": 0.1,
        },
    },
}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
        (4, {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}}),
    ],
    ids=["zero3", "pp2-sp2"],
)
def test_a_layout(ranks: int, parallel: dict[str, Any], pool: Pool) -> None:
    same(pool, alone(pool, MODEL, **SECTIONS), ranks, MODEL, parallel, **SECTIONS)


GATHER = {"context": {"gather": True}}
SOFTMAX = {
    **MODEL,
    "token_types": 2,
    "stack": {**MODEL["stack"], "block": {**MODEL["stack"]["block"], "mixer": {"kind": "attention", "heads": 4}}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "model", "parallel"),
    [
        (2, MODEL, {"mesh": {"cp": 2}, **GATHER}),
        (2, SOFTMAX, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}),
        (3, SOFTMAX, {"mesh": {"cp": 3}, "context": {"style": "ring"}, "zero": {"stage": 3}}),
        (4, SOFTMAX, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}}),
        (4, SOFTMAX, {"mesh": {"cp": 2, "pp": 2}}),
    ],
    ids=["gather", "ulysses", "ring", "cp2-sp2", "cp2-pp2"],
)
def test_a_sharded_sequence_has_the_numbers_of_one_process(
    ranks: int, model: dict[str, Any], parallel: dict[str, Any], pool: Pool
) -> None:
    same(pool, alone(pool, model, **SECTIONS), ranks, model, parallel, **SECTIONS)


BOUNDARIES = {"objective": {"kind": "span_boundary"}, **SECTIONS}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}),
        pytest.param(3, {"mesh": {"cp": 3}, "context": {"style": "ring"}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "pp": 2}}, marks=pytest.mark.long),
    ],
    ids=["ulysses", "ring", "cp2-sp2", "cp2-pp2"],
)
def test_a_boundary_head_finds_tokens_by_index(ranks: int, layout: dict[str, Any], pool: Pool) -> None:
    """On 3 ranks a chunk is shorter than the global tokens, so that the first one has no token of the text."""
    model = {**SOFTMAX, "boundary_head": {"max_span": 10}}
    one = alone(pool, model, **BOUNDARIES)
    assert "head.boundary/loss" in one.statistics
    same(pool, one, ranks, model, layout, **BOUNDARIES)


@distributed(ranks=3)
def test_any_rank_may_have_the_first_token_of_the_text() -> None:
    """A sentence head reads it, and each rank has a part of its loss."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6 + 11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    for balanced in (False, True):
        sharding = SequenceSharding(dist.group.WORLD, balanced, global_tokens=6)
        shard = shard_tokens(Tokens.from_ids(torch.zeros(2, 11, dtype=torch.long)), sharding).with_global_tokens(6)
        state = FirstStateOfShards(6, lambda x, tokens: x[:, 6])(sharding.shard(x), shard)
        assert torch.equal(state, x[:, 6])
        (gradient,) = torch.autograd.grad((state * weight).sum() / 3, x)
        total = all_reduce(gradient, dist.group.WORLD)
        expected = torch.zeros_like(x)
        expected[:, 6] = weight
        assert torch.allclose(total, expected, atol=1e-15)
