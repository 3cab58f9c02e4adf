"""Lite Transformer's branches: each has half of the channels, and is the mixer that it would be alone."""

from dataclasses import replace
from typing import Any

import torch

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, other_from, ready, tokens
from xscale.core.config import decode
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.lightweight_conv import LightweightConv
from xscale.nn.mixer.long_short_range import LongShortRange

LENGTH = 29
GIVEN: dict[str, Any] = {
    "long_range": {"kind": "attention", "heads": 2},
    "short_range": {"kind": "lightweight_conv", "heads": 4, "kernel_sizes": [5], "dynamic": True},
}


def network(causal: bool = True) -> LongShortRange:
    config = decode(LongShortRange.Config, GIVEN)
    around = dims(causal=causal)
    assert LongShortRange.check(config, around, "mixer") == []
    return ready(LongShortRange(config, around))


def test_the_halves_are_mixed_apart() -> None:
    for causal in (True, False):
        part, x = network(causal), drawn(2, LENGTH, WIDTH)
        half = replace(dims(causal=causal), width=WIDTH // 2)
        config = decode(LongShortRange.Config, GIVEN)
        attention = Attention(config.long_range, half).double()
        convolution = LightweightConv(config.short_range, half).double()
        attention.load_state_dict(part.long_range.state_dict())
        convolution.load_state_dict(part.short_range.state_dict())
        for documents in (None, numbered(10, 19)):
            about = tokens(LENGTH, documents=documents)
            y = part(x, about)
            assert close(y[..., : WIDTH // 2], attention(x[..., : WIDTH // 2], about))
            assert close(y[..., WIDTH // 2 :], convolution(x[..., WIDTH // 2 :], about))


def test_the_convolution_is_the_short_range() -> None:
    part, x = network(), drawn(2, LENGTH, WIDTH)
    changed = part(torch.cat((other_from(x[:, :1], 0, 1), x[:, 1:]), 1), tokens(LENGTH)) - part(x, tokens(LENGTH))
    assert changed[:, 20:, : WIDTH // 2].abs().min() > 0
    assert not changed[:, 5:, WIDTH // 2 :].any()


def test_branches_that_cannot_be_are_refused() -> None:
    config = decode(LongShortRange.Config, {"long_range": {"kind": "fourier"}, "short_range": {"kind": "attention"}})
    problems = LongShortRange.check(config, dims(width=33), "mixer")
    assert [problem.path for problem in problems] == ["model.width", "mixer.long_range", "mixer.short_range"]
    assert "lightweight_conv" in str(problems[-1])
    nested = decode(LongShortRange.Config, {"long_range": {"kind": "attention", "heads": 3}})
    assert "mixer.long_range.heads" in [problem.path for problem in LongShortRange.check(nested, dims(), "mixer")]
