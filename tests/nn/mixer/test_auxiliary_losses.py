"""Auxiliary losses of attention under gradient accumulation: halves of a batch, at half the weight, add up to it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.attention.adaptive_span import AdaptiveSpan
from xscale.nn.attention.disagreement import Disagreement
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.dynamic_span import DynamicSpan
from xscale.nn.mixer.guided_attention import GuidedAttention
from xscale.nn.mixer.mixer import MIXERS, Mixer

LENGTH = 20
CONFIGS: dict[str, Any] = {
    "adaptive_span": Attention.Config(heads=4, core=AdaptiveSpan.Config(initial_span=8.0, span_loss_weight=0.5)),
    "dynamic_span": DynamicSpan.Config(heads=4, span_loss_weight=0.5),
    "disagreement": Attention.Config(heads=4, core=Disagreement.Config(subspace_weight=1.0, position_weight=1.0)),
    "guided_attention": GuidedAttention.Config(heads=4, patterns=("previous", "first")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    part: Mixer = ready(MIXERS.build(CONFIGS[name], dims(length=LENGTH)))
    for parameter_name, parameter in part.named_parameters():
        if parameter_name == "core.span":
            # At its ends the gradient of each micro-batch is clipped by itself.
            parameter.data.clamp_(0.01, 0.99)
    x = drawn(4, LENGTH, WIDTH)

    def gradients(samples: slice, weight: float | None) -> list[torch.Tensor]:
        around = tokens(LENGTH, batch=4)
        around = replace(
            around.with_forward(aux_loss_weight=weight), ids=around.ids[samples], positions=around.positions[samples]
        )
        out = part(x[samples], around)
        return list(torch.autograd.grad(out.square().sum(), list(part.parameters())))

    whole = gradients(slice(0, 4), 1.0)
    halves = [gradients(samples, 0.5) for samples in (slice(0, 2), slice(2, 4))]
    without = gradients(slice(0, 4), None)
    for full, first, second in zip(whole, *halves, strict=True):
        assert close(full, first + second)
    assert any(not close(full, plain) for full, plain in zip(whole, without, strict=True)), "the loss has no gradient"
