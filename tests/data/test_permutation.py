"""The order that is never stored is a permutation, another one for each seed, and looks drawn."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.data.samples.packed import permuted


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 2000), seed=st.integers(0, 2**64))
def test_every_index_is_hit_once(length: int, seed: int) -> None:
    order = permuted(np.arange(length), length, seed)
    assert np.array_equal(np.sort(order), np.arange(length))


def test_an_index_alone_goes_where_it_goes_among_all() -> None:
    whole = permuted(np.arange(1000), 1000, 7)
    assert [int(permuted(np.array([index]), 1000, 7)[0]) for index in range(0, 1000, 97)] == whole[::97].tolist()


def test_the_order_is_the_same_forever() -> None:
    assert permuted(np.arange(8), 8, 0).tolist() == FOREVER


FOREVER = [3, 0, 7, 4, 1, 5, 6, 2]


def test_seeds_differ_and_nothing_is_left_in_place() -> None:
    length = 20_000
    one, other = (permuted(np.arange(length), length, seed) for seed in (1, 2))
    for order in (one, other):
        # A random permutation has one fixed point on average, and no correlation with the order it had.
        assert (order == np.arange(length)).sum() < 10
        assert abs(np.corrcoef(order, np.arange(length))[0, 1]) < 0.03
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert (np.diff(one) == 1).sum() < 10


def test_a_range_larger_than_memory_costs_nothing() -> None:
    length = 10**15
    order = permuted(np.arange(100), length, 3)
    assert len(set(order.tolist())) == 100
    assert 0 <= order.min() < order.max() < length
