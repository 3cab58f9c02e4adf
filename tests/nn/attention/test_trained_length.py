"""Cores with weights for the positions of the trained length refuse a longer sequence in words."""

import re
from typing import Any

import pytest

from tests.nn.attention.literal import build, inputs
from xscale.core.errors import ConfigError
from xscale.nn.attention.linformer import Linformer
from xscale.nn.attention.nprf import Nprf
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.sinkhorn import SinkhornCore

REFUSED = {
    "nprf": Nprf.Config(),
    "linformer": Linformer.Config(projected_length=8),
    "linformer, mean pooling": Linformer.Config(projected_length=8, projection="mean"),
    "sinkhorn": SinkhornCore.Config(block=16),
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_a_sequence_longer_than_trained_is_refused(config: Any) -> None:
    core = build(config, causal=False, length=64)
    q, k, v = inputs(64)
    assert core(q, k, v, AttentionMask(64, 64, False)).isfinite().all()
    with pytest.raises(ConfigError, match=re.escape("data.sequence_length: ")) as raised:
        core(*inputs(65), AttentionMask(65, 65, False))
    assert "weights for 64 positions, and the sequence has 65 tokens" in str(raised.value)
