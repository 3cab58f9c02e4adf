"""Conformance of the trait `prefix` of cores: a prefix is read in both directions, the rest in order."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conformance.checked import each_case
from tests.conformance.test_core_cheats import Written, registered
from xscale.conformance.attention import core_prefix as suite
from xscale.conformance.check import Arguments, Check
from xscale.nn.attention.ops.mask import AttentionMask


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)


class Reads(Written):
    """Hides by a bias what the mask does not allow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        if mask.allowed is None:
            return super().forward(q, k, v, mask)
        hidden = torch.zeros(mask.allowed.shape, dtype=q.dtype).masked_fill(~mask.allowed, float("-inf"))
        return super().forward(q, k, v, AttentionMask(mask.queries, mask.keys, False, bias=hidden))


class Forgets(Reads):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, key_prefix=None))


class SeesAll(Reads):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return super().forward(q, k, v, replace(mask, causal=mask.causal and mask.key_prefix is None))


def test_cheats_are_caught() -> None:
    suite.a_core_reads_a_prefix_both_ways(registered(Reads, prefix=True))
    for cheat in (Forgets, SeesAll):
        with pytest.raises(AssertionError):
            suite.a_core_reads_a_prefix_both_ways(registered(cheat, prefix=True))
