"""The benchmark of parallelism: equal numbers before timing, each kind against torch's API."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool, RankError
from xscale.bench.parallel.run import CASES, bench, bench_parallel, check_same_numbers, format_table
from xscale.bench.parallel.sizes import ParallelSizes
from xscale.core.errors import ConfigError

SMALL = ParallelSizes(width=32, depth=2, length=16, sequences=4, vocabulary=64, hidden=48, experts=4)


def benchmarked() -> dict[str, Any]:
    """Run every case on this rank."""
    return bench_parallel(list(CASES), SMALL, 1)


def test_both_sides_agree_and_are_timed(pool: Pool) -> None:
    """bench_parallel checks that gradients and losses are equal; ratios at these sizes are noise."""
    found, other = pool.run(benchmarked, 2)
    assert found["first"]
    assert not other["first"]
    assert [case["name"] for case in found["cases"]] == list(CASES)
    for case in found["cases"]:
        assert case["ratio"] == pytest.approx(case["xscale_milliseconds"] / case["torch_milliseconds"])
        assert case["processor_ratio"] > 0
        assert case["name"] in format_table(found)


class Fixed:
    """A side with given loss and gradients."""

    def __init__(self, loss: float, **gradients: Tensor) -> None:
        self.loss, self.found = loss, gradients

    def step(self) -> Tensor:
        return torch.tensor(self.loss)

    def gradients(self) -> dict[str, Tensor]:
        return self.found

    def clear(self) -> None:
        self.found = {}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Fixed(1.001, w=torch.ones(2)), "losses"),
        (Fixed(1.0, w=torch.tensor([1.0, 1.001])), r"gradient of w off by 0\.001"),
        (Fixed(1.0, w=torch.ones(2), b=torch.ones(1)), r"\['b'\] on one side only"),
    ],
    ids=["loss", "gradient", "parameter"],
)
def test_sides_with_different_numbers_are_not_timed(other: Fixed, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_same_numbers("tp", Fixed(1.0, w=torch.ones(2)), other, repeats=1)


def without_sums() -> None:
    """The xscale side without all-reduces over tp."""
    with patch("xscale.parallel.shard.region.sum_out", lambda x, _: x):
        bench_parallel(["tp"], SMALL, 1)


def test_a_lost_collective_is_seen(pool: Pool) -> None:
    """Negative control."""
    with pytest.raises(RankError, match="the two sides differ"):
        pool.run(without_sums, 2)


@pytest.mark.parametrize(
    ("names", "sizes", "rounds", "said"),
    [
        (["dp"], SMALL, 1, "there is no 'dp'"),
        ([], ParallelSizes(length=30), 1, "30 is not a multiple of 4"),
        ([], SMALL, 0, "must be at least 1, got 0"),
    ],
)
def test_invalid_arguments(names: list[str], sizes: ParallelSizes, rounds: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench(names, sizes, rounds, as_json=False, record=None)
