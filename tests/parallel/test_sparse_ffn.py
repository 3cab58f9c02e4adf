"""The sparse feed-forward layer on layouts: its blocks are sharded, and the noise is that of one process."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, built, same
from xscale.generate.generate import generate

FFN: dict[str, Any] = {"kind": "sparse", "hidden": 48, "block_size": 6, "controller_width": 5, "hard_fraction": 0.5}
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 4}, "ffn": FFN, "dropout": 0.1}
MODEL: dict[str, Any] = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
}


@pytest.mark.parametrize(
    "names", [["tp", "cp"], pytest.param(["pp", "zero 3"], marks=pytest.mark.long)], ids=" and ".join
)
def test_a_layout_trains_as_one_process(names: list[str], pool: Pool) -> None:
    expected = alone(pool, MODEL)
    for name in names:
        same(pool, expected, 2, MODEL, LAYOUTS[name])


@pytest.mark.long
def test_context_and_tensor_parallelism_together(pool: Pool) -> None:
    same(pool, alone(pool, MODEL), 4, MODEL, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}})


def written(parallel: dict[str, Any]) -> list[int]:
    network = built(MODEL, parallel)[2]
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_a_rank_decodes_with_its_blocks(pool: Pool) -> None:
    expected = pool.run(written, 1, {})[0]
    assert len(set(expected)) > 3
    assert pool.run(written, 2, {"mesh": {"tp": 2}}) == [expected, expected]


def test_ranks_that_do_not_divide_the_blocks_are_refused() -> None:
    block = {**BLOCK, "mixer": {"kind": "attention", "heads": 3, "head_width": 8}}
    heads = {**MODEL, "stack": {"depth": 2, "block": block}}
    (problem,) = asked(heads, {"mesh": {"tp": 3}}, train={"batch_size": 6}).check(3)
    assert "tp=3 does not divide the 8 blocks of hidden units of ffn 'sparse'" in str(problem)
    assert str(problem).endswith("Take 1."), "2, 4 and 8 divide the blocks, and not the heads"
