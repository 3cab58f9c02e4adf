"""Packing: every token is predicted once an epoch, documents are told apart, the order is a pure function."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.core.errors import ConfigError
from xscale.data.corpus.prepared import Split
from xscale.data.indexed import IndexedDataset, IndexedWriter
from xscale.data.samples.packed import PackedDataset


def split(folder: Path, lengths: list[int], first: int = 0, stop: int | None = None) -> Split:
    """Documents of those lengths whose tokens count up through the whole pair."""
    writer = IndexedWriter(folder / "pair", np.uint16)
    at = 0
    for length in lengths:
        writer.add(list(range(at, at + length)))
        at += length
    writer.finish()
    return Split("train", IndexedDataset(folder / "pair"), first, len(lengths) if stop is None else stop)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=30),
    length=st.integers(1, 7),
    first=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_an_epoch_predicts_each_token_once_and_knows_its_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, first: int, seed: int
) -> None:
    part = split(tmp_path_factory.mktemp("pair"), lengths, first)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    begin = sum(lengths[:first])
    total = sum(lengths) - begin
    if total < length + 1:
        return
    packed = PackedDataset(part, length, seed=seed)
    assert len(packed) == (total - 1) // length
    for epoch in (0, 1, 3):
        predicted = []
        for index in range(len(packed)):
            tokens, documents = packed.sample(epoch * len(packed) + index)
            assert tokens.dtype == documents.dtype == np.int64
            assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + length + 1))
            assert np.array_equal(documents, owner[tokens] - owner[tokens[0]])
            predicted += tokens[1:].tolist()
        assert sorted(predicted) == list(range(begin + 1, begin + 1 + len(packed) * length))


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    part = split(tmp_path, [500] * 8)
    orders = {}
    for seed in (0, 1, 2):
        packed = PackedDataset(part, 10, seed=seed)
        for epoch in (0, 1, 2):
            start = epoch * len(packed)
            orders[seed, epoch] = tuple(packed.positions(np.arange(start, start + len(packed))).tolist())
    assert len(set(orders.values())) == len(orders)
    plain = PackedDataset(part, 10, shuffle=False)
    assert plain.positions(np.arange(0, 2 * len(plain))).tolist() == [*range(len(plain))] * 2


def test_samples_across_the_end_of_an_epoch(tmp_path: Path) -> None:
    packed = PackedDataset(split(tmp_path, [50] * 4), 10, seed=5)
    whole = packed.positions(np.arange(3 * len(packed)))
    assert [int(packed.positions(np.array([index]))[0]) for index in range(3 * len(packed))] == whole.tolist()


def test_a_part_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    part = split(tmp_path, [5, 5])
    assert len(PackedDataset(part, 9)) == 1
    with pytest.raises(
        ConfigError, match=r"data\.sequence_length: the train split has 10 tokens, but a sample needs 11"
    ):
        PackedDataset(part, 10)
