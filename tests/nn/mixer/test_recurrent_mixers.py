"""Properties that all mixers with a recurrent state share: half precision, and work that is linear in the length."""

from typing import Any

import pytest
import torch

from tests.conformance.made import WIDTH, dims, drawn, ready, tokens
from tests.families import example
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.mixer.recurrent_mixer import RecurrentMixer
from xscale.nn.module import substitute

RECURRENT = [entry for entry in MIXERS if issubclass(entry.part, RecurrentMixer)]
LENGTH = 150


def built(entry: Any) -> RecurrentMixer:
    part: RecurrentMixer = ready(entry.part(example(entry), dims(length=LENGTH)))
    return part


def test_the_family_is_complete() -> None:
    assert {entry.name for entry in RECURRENT} == {"gated_delta_net", "gated_linear_attention", "mamba2", "rwkv7"}


@pytest.mark.parametrize("entry", RECURRENT, ids=lambda entry: str(entry.name))
def test_bfloat16_is_near(entry: Any) -> None:
    """Sums over the sequence are in float32: the error is that of the projections, whatever the length."""
    part, x = built(entry), drawn(2, LENGTH, WIDTH)
    whole = part(x, tokens(LENGTH))
    half = part.bfloat16()(x.bfloat16(), tokens(LENGTH))
    assert half.dtype is torch.bfloat16
    for span in (slice(0, 20), slice(LENGTH - 20, LENGTH)):
        assert (half[:, span].double() - whole[:, span]).norm() < 0.05 * whole[:, span].norm()


@pytest.mark.parametrize("entry", RECURRENT, ids=lambda entry: str(entry.name))
def test_its_own_work_grows_with_the_length(entry: Any) -> None:
    part = built(entry)
    assert part.multiply_adds(4096, 4096) == 2 * part.multiply_adds(2048, 2048)
    assert part.transition_size() == sum(kept[0, 0].numel() for kept in transition(part))


def transition(part: RecurrentMixer) -> tuple[torch.Tensor, torch.Tensor]:
    """A and E of a sequence of the mixer."""
    kept: list[Any] = []

    def scan(recurrence: Any, around: Any) -> torch.Tensor:
        kept.append(recurrence.transition())
        result: torch.Tensor = recurrence.outputs_and_state()[0]
        return result

    substitute(part, "scan", scan)
    part(drawn(2, 9, WIDTH), tokens(9))
    ((matrix, ended),) = kept
    return matrix, ended
