"""Conformance of the trait `static_decode` of cores, and cores that break it."""

from dataclasses import replace

import pytest
from torch import Tensor

from tests.conformance.checked import each_case
from tests.conformance.test_core_cheats import Written, registered
from xscale.conformance.attention import core_static as suite
from xscale.conformance.check import Arguments, Check
from xscale.nn.attention.ops.mask import AttentionMask


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class SeesAll(Written):
    """Knows nothing of a cache that is not full."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, last_keys=None))


def test_a_core_that_ignores_the_last_key_is_caught() -> None:
    with pytest.raises(AssertionError, match="is the last of sample"):
        suite.one_query_of_each_sample_at_its_own_place(registered(SeesAll, static_decode=True))
