"""The overload factor of the busiest expert-parallel rank: by hand, and as a run logs it."""

import math
from pathlib import Path

import pytest
import torch

from tests.distributed import Pool
from tests.train.test_layouts import one_rank
from tests.train.tiny import metrics
from xscale.parallel.expert import overload_factor
from xscale.train.optimizer_step.statistics import logged_values

SKEWED = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
PATH = "stack.blocks.1.ffn.part"


@pytest.mark.parametrize(
    ("rows", "ranks", "factor"),
    [
        pytest.param(SKEWED, 2, 0.8 * 2, id="four experts of eight get four fifths"),
        pytest.param(SKEWED, 4, 0.6 * 4, id="the first two get three fifths"),
        pytest.param(SKEWED, 8, 0.4 * 8, id="an expert on each rank"),
        pytest.param(SKEWED.flip(0), 4, 0.6 * 4, id="the last rank"),
        pytest.param(torch.tensor([3, 1, 1, 3]), 2, 1.0, id="uneven experts, even ranks"),
        pytest.param(torch.tensor([0, 0, 0, 7]), 4, 4.0, id="all on one rank"),
        pytest.param(SKEWED, 1, 1.0, id="one rank"),
    ],
)
def test_by_hand(rows: torch.Tensor, ranks: int, factor: float) -> None:
    assert overload_factor(rows, ranks) == pytest.approx(factor, rel=1e-6)


def test_without_rows_there_is_no_factor() -> None:
    assert math.isnan(overload_factor(torch.zeros(4), 2))


@pytest.mark.parametrize(
    ("means", "ep", "overload"),
    [
        pytest.param({"a/load": SKEWED}, 4, {"a/overload": 2.4}, id="dropless"),
        pytest.param({"a/load": SKEWED, "a/rows": SKEWED.new_ones(8)}, 4, {"a/overload": 1.0}, id="rows, not load"),
        pytest.param({"a/load": SKEWED, "b/load": SKEWED[4:]}, 2, {"a/overload": 1.6, "b/overload": 1.0}, id="layers"),
        pytest.param({"a/load": SKEWED}, 1, {}, id="ep 1 has none"),
        pytest.param({"a/dropped": torch.tensor(0.1)}, 2, {}, id="no mixture"),
    ],
)
def test_each_layer_is_logged(means: dict[str, torch.Tensor], ep: int, overload: dict[str, float]) -> None:
    values = logged_values(means, {}, ep)
    assert {key: value for key, value in values.items() if key.endswith("/overload")} == pytest.approx(overload)


def test_a_run_logs_its_busiest_rank_and_a_run_without_expert_parallelism_none(tmp_path: Path, pool: Pool) -> None:
    settings = {"train": {"steps": 2, "eval_every": 0}}
    pool.run(one_rank, 2, tmp_path, "sharded", parallel={"mesh": {"ep": 2}}, **settings)
    pool.run(one_rank, 1, tmp_path, "single", **settings)
    sharded, single = metrics(tmp_path, "sharded"), metrics(tmp_path, "single")
    for line, other in zip(sharded, single, strict=True):
        rows = line[f"{PATH}/rows"]
        assert line[f"{PATH}/overload"] == pytest.approx(2 * max(rows[0] + rows[1], rows[2] + rows[3]))
        assert line[f"{PATH}/overload"] > 1
        assert f"{PATH}/overload" not in other
        assert other[f"{PATH}/rows"] == pytest.approx(rows, abs=0.05), "the same rows"
