"""Each feature of a model has the numbers of one process on its layouts, and generates the same on them."""

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import BATCH, alone, asked, built, same
from tests.parallel.exit_features import EXITS
from tests.parallel.features import (
    CP,
    FEATURES,
    FLOATER,
    HALTING,
    PP,
    REFUSED,
    SP,
    SPARSE,
    TP,
    Section,
    ranks_of,
    sparse_qkv,
)
from xscale.generate.decoders import incremental
from xscale.generate.generate import generate
from xscale.parallel import context
from xscale.settings.settings import build_on_meta

EVERY = {**FEATURES, **EXITS}
CASES = [
    pytest.param(name, layout, marks=[] if layout in feature.quick else pytest.mark.long, id=f"{name} on {layout}")
    for name, feature in EVERY.items()
    for layout in feature.layouts
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_has_the_numbers_of_one_process(name: str, layout: str, pool: Pool) -> None:
    feature = EVERY[name]
    parallel = feature.layouts[layout]
    expected = alone(pool, feature.model, **feature.sections)
    for part, count in feature.parameters.items():
        assert sum(part in parameter for parameter in expected.ended) == count
    same(pool, expected, ranks_of(parallel), feature.model, parallel, **feature.sections)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_shard_is_refused(name: str) -> None:
    model, parallel, words = REFUSED[name]
    ranks = ranks_of(parallel)
    batch = BATCH if BATCH % ranks == 0 else 2 * ranks
    problems = [str(problem) for problem in asked(model, parallel, train={"batch_size": batch}).check(ranks)]
    assert any(all(word in problem for word in words) for problem in problems), problems


def written(model: Section, parallel: Section) -> list[int]:
    network = built(model, parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (SPARSE.model, TP),
        (FLOATER, PP),
        (sparse_qkv(), CP),
        pytest.param(HALTING.model, PP, marks=pytest.mark.long),
        pytest.param(HALTING.model, SP, marks=pytest.mark.long),
    ],
    ids=["blocks of hidden units", "dynamics of all layers", "modules", "halting on stages", "halting on shards"],
)
def test_generation_on_two_ranks(model: Section, layout: Section, pool: Pool) -> None:
    (expected,) = pool.run(written, 1, model, {})
    assert len(set(expected)) > 3
    assert pool.run(written, 2, model, layout) == [expected, expected]


def test_the_exchange_of_neighbours_is_estimated_beside_attention() -> None:
    recipe = asked(sparse_qkv(), CP, data={"sequence_length": 64})
    sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, 64)
    # In each block two tokens go from the first rank to the second.
    assert sent["neighbours"] == 2 * 2 * 32 / 2
    assert len(sent) == 2
