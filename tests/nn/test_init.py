"""Starts: their distributions, and seeds that depend on every word."""

from typing import Any

import pytest
import torch

from xscale.nn.init import ONES, STREAM, ZEROS, Init, draw, seed_of


def test_a_normal_start_has_its_spread_and_no_tails() -> None:
    value = draw(Init(std=0.5), (400, 300), 0, "weight")
    assert value.dtype == torch.float32
    assert value.mean().item() == pytest.approx(0, abs=0.01)
    assert value.std().item() == pytest.approx(0.5, rel=0.02)
    assert value.abs().max() <= 1.5


def test_constant_starts() -> None:
    assert torch.equal(draw(ZEROS, (2, 3), 0, "bias"), torch.zeros(2, 3))
    assert torch.equal(draw(ONES, (3,), 0, "gain"), torch.ones(3))
    assert draw(ONES, (4, 3), 0, "gain", range(1, 3)).shape == (2, 3)


def test_slices_are_streams_of_their_own() -> None:
    some = draw(Init(slices=True), (4, 5), 0, "experts")
    more = draw(Init(slices=True), (8, 5), 0, "experts")
    assert torch.equal(more[:4], some)
    assert not torch.equal(some[0], some[1])


def test_a_seed_depends_on_every_word_and_where_words_part() -> None:
    seeds = [
        seed_of(0, "a", "b"),
        seed_of(1, "a", "b"),
        seed_of(0, "ab"),
        seed_of(0, "b", "a"),
        seed_of(0, "a", "b", 0),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Written down once: another number would change every model's start.
    assert seed_of(0, "stack.blocks.0.ffn.part.up.weight") == WRITTEN


WRITTEN = 7459830867130521059


def test_a_rank_without_any_slice_draws_nothing() -> None:
    """A rank without experts, where more ranks share experts than there are."""
    init = Init("normal", 0.02, slices=True)
    assert draw(init, (2, 3, 4), 1, "experts.up", range(2, 2)).shape == (0, 3, 4)


@pytest.mark.parametrize("shape", [(64, 16), (33, 48), (7, 3), (40, 6, 2), (24,), (1000, 1056), (5001, 1000)])
def test_rows_are_drawn_as_those_of_the_full_tensor(shape: tuple[int, ...]) -> None:
    """A rank draws its rows alone, bit for bit as if it drew all: by skipping the numbers before them."""
    full = draw(Init(std=0.5), shape, 3, "weight")
    count = shape[0]
    for rows in (range(count), range(1), range(1, count // 2), range(count // 2, count), range(count - 1, count)):
        assert torch.equal(draw(Init(std=0.5), shape, 3, "weight", rows), full[rows.start : rows.stop])
    assert draw(Init(std=0.5), shape, 3, "weight", range(2, 2)).shape == (0, *shape[1:])


def test_a_rank_makes_only_its_own_numbers_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    normal = torch.Tensor.normal_

    def counted(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        sizes.append(self.numel())
        return normal(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    draw(Init(), (512, 64), 3, "weight", range(128, 192))
    assert sizes == [64 * 64]


def test_the_last_shard_of_a_large_parameter_skips_part_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []
    uniform = torch.Tensor.uniform_

    def counted(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        skipped.append(self.numel())
        return uniform(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "uniform_", counted)
    value = draw(Init(), (2**14, 1024), 3, "weight", range(2**14 - 16, 2**14))
    assert sum(skipped) == STREAM - 16 * 1024
    assert value.std().item() == pytest.approx(0.02, rel=0.05)


def test_streams_of_a_large_parameter_differ() -> None:
    value = draw(Init(), (5 * 1024, 1024), 3, "weight").view(5, -1)
    assert torch.corrcoef(value[:, ::64]).fill_diagonal_(0).abs().max() < 0.05
