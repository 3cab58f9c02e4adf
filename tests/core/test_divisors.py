"""Divisors, which advice is made of: those of every count, and at once for counts of any size."""

import pytest

from xscale.core.requirements import divisors_of, must_divide


@pytest.mark.parametrize("count", [*range(1, 60), 10_007, 65_536])
def test_they_are_those_of_the_count(count: int) -> None:
    assert divisors_of(count) == [number for number in range(1, count + 1) if count % number == 0]


def test_a_mistake_of_any_size_is_said_at_once() -> None:
    """A search through all numbers would not end."""
    (problem,) = must_divide("mixer", "heads", 4, "width", 10**18 - 1)
    assert problem.choices
    assert 10**18 - 1 in divisors_of(10**18 - 1)
