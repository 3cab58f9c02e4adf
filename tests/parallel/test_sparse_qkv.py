"""Sparse QKV on layouts: its convolution fetches the tokens before a shard; what mixes modules is not sharded."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, built, same
from xscale.generate.generate import generate, incremental
from xscale.parallel import context
from xscale.settings.settings import build_on_meta

MIXER: dict[str, Any] = {"kind": "sparse_qkv", "heads": 4, "modules": 8}
FFN: dict[str, Any] = {"kind": "sparse", "hidden": 32, "block_size": 4}


def model(kind: str = "decoder", **changes: Any) -> dict[str, Any]:
    block = {"mixer": {**MIXER, **changes}, "ffn": FFN, "dropout": 0.1}
    return {"kind": kind, "width": 32, "stack": {"depth": 2, "block": block}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}},
    "ring": {"mesh": {"cp": 2}, "context": {"style": "ring"}, "recompute": {"every": 1}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
}


@pytest.mark.parametrize(
    "names", [["cp"], pytest.param(["ring", "pp", "zero 3"], marks=pytest.mark.long)], ids=" and ".join
)
def test_a_layout_trains_as_one_process(names: list[str], pool: Pool) -> None:
    expected = alone(pool, model())
    for name in names:
        same(pool, expected, 2, model(), LAYOUTS[name])


@pytest.mark.long
def test_a_bidirectional_window_reaches_both_ranks(pool: Pool) -> None:
    encoder = model("encoder", output=True, length_kernel=4)
    same(pool, alone(pool, encoder), 2, encoder, LAYOUTS["cp"])


def written(parallel: dict[str, Any]) -> list[int]:
    network = built(model(), parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_generation_on_two_ranks(pool: Pool) -> None:
    expected = pool.run(written, 1, {})[0]
    assert len(set(expected)) > 3
    assert pool.run(written, 2, LAYOUTS["cp"]) == [expected, expected]


def test_the_exchange_of_neighbours_is_estimated_beside_attention() -> None:
    recipe = asked(model(), {"mesh": {"cp": 2}}, data={"sequence_length": 64})
    sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, 64)
    # In each block two tokens go from the first rank to the second.
    assert sent["neighbours"] == 2 * 2 * 32 / 2
    assert len(sent) == 2


@pytest.mark.parametrize("output", [False, True])
def test_sharded_heads_are_refused(output: bool) -> None:
    problems = [str(problem) for problem in asked(model(output=output), {"mesh": {"tp": 2}}).check(2)]
    (problem,) = [problem for problem in problems if "mixes the heads of a token" in problem]
    assert "mixer 'sparse_qkv' mixes the heads of a token, so tp cannot shard them" in problem
    assert "Take 1, or model.stack.block.mixer.kind=attention." in problem
