"""Padding behind the text of samples: a padded sample has the numbers that it has alone, by all mixers and cores."""

from typing import Any

import pytest
import torch

from tests.conformance.made import WIDTH, close, drawn, tokens
from tests.conformance.test_mixer import Case, built, marks, modes, settings
from tests.families import each, example
from xscale.core.errors import ConfigError
from xscale.core.registry import Entry
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.tokens import Tokens

LENGTH = 70
LENGTHS = (LENGTH, 41, 20)
"""Tokens of the samples of a batch: one without padding, and two that a block of usual size holds or not."""


def hides(entry: Entry[Any]) -> bool:
    return entry.traits.documents or entry.traits.padding or not entry.traits.bidirectional


def cases() -> list[Any]:
    """Mixers that hide padding, with each of their cores."""
    return [
        pytest.param((entry, config), id=name, marks=marks(entry, config))
        for entry in MIXERS
        if hides(entry)
        for name, config in settings(entry, "random", False)
    ]


def padded(lengths: tuple[int, ...], batch: Tokens) -> Tokens:
    padding = torch.arange(batch.ids.shape[1]) >= torch.tensor(lengths)[:, None]
    return Tokens.from_ids(batch.ids, padding.long(), padding=padding)


@pytest.mark.parametrize("case", cases())
def test_a_padded_sample_is_as_it_is_alone(case: Case) -> None:
    for causal in modes(case):
        mixer = built(case, causal=causal)
        x = drawn(len(LENGTHS), LENGTH, WIDTH)
        batch = padded(LENGTHS, tokens(LENGTH, batch=len(LENGTHS)))
        leaf = x.clone().requires_grad_()
        whole = mixer(leaf, batch)
        assert whole.isfinite().all(), "what stands at padding is read by norms"
        weights = drawn(*x.shape, seed=3)
        (slope,) = torch.autograd.grad((whole * weights * ~batch.padding[..., None]).sum(), leaf)
        for row, length in enumerate(LENGTHS):
            alone = x[row : row + 1, :length].clone().requires_grad_()
            out = mixer(alone, Tokens.from_ids(batch.ids[row : row + 1, :length]))
            assert close(whole[row : row + 1, :length], out), f"a text of {length} tokens sees its padding"
            (wanted,) = torch.autograd.grad((out * weights[row : row + 1, :length]).sum(), alone)
            assert close(slope[row : row + 1, :length], wanted)
            assert close(slope[row, length:], torch.zeros_like(slope[row, length:]))


@each(entry for entry in MIXERS if not entry.traits.documents)
def test_packed_documents_are_refused_in_words(entry: Entry[Any]) -> None:
    case = (entry, example(entry))
    mixer = built(case, causal=modes(case)[0])
    numbers = (torch.arange(LENGTH) >= 30).long().expand(2, -1)
    with pytest.raises(ConfigError, match="cannot mask packed documents from each other"):
        mixer(drawn(2, LENGTH, WIDTH), tokens(LENGTH, documents=numbers))
