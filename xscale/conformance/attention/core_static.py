"""Conformance of the trait `static_decode` of cores: keys behind the last one are as if they were not there."""

from typing import Any

import torch

from xscale.conformance.check import check
from xscale.conformance.small_parts import LENGTH, close, core, other_from, qkv, run
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import AttentionMask

LAST = (0, 63, 64, 199)
"""Last keys of the queries."""


@check("core", lambda entry: entry.traits.static_decode)
def one_query_of_each_sample_at_its_own_place(entry: Entry[Any]) -> None:
    assert entry.traits.static_decode
    part, (q, k, v) = core(entry), qkv(groups=2)
    for first in LAST:
        last = torch.tensor([[first], [LENGTH - 1 - first]])  # [B, 1]
        query = torch.stack([q[b, :, n] for b, n in enumerate(last[:, 0])])[:, :, None]
        mask = AttentionMask(1, LENGTH, True, offset=LENGTH - 1, last_keys=last)
        out = run(part, query, k, v, mask=mask)
        for b, n in enumerate(last[:, 0].tolist()):
            seen = (x[b : b + 1, :, : n + 1] for x in (k, v))
            alone = run(part, query[b : b + 1], *seen, mask=AttentionMask(1, n + 1, True, offset=n))
            assert close(out[b : b + 1], alone), f"key {n} is the last of sample {b}"
            unseen = run(part, query, *(other_from(x, n + 1) for x in (k, v)), mask=mask)
            assert close(unseen[b], out[b]), f"keys behind {n} are seen"
