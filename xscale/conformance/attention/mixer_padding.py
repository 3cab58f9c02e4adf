"""Padding behind the text of samples: a padded sample has the numbers that it has alone, by all mixers and cores."""

from collections.abc import Iterator
from typing import Any

import torch

from xscale.conformance.attention.mixer import Case, built, modes, settings
from xscale.conformance.check import check
from xscale.conformance.small_parts import WIDTH, close, drawn, example, tokens
from xscale.core.errors import ConfigError
from xscale.core.registry import Entry
from xscale.nn.tokens import Tokens

LENGTH = 70
LENGTHS = (LENGTH, 41, 20)
"""Tokens of the samples of a batch: one without padding, and two that a block of usual size holds or not."""


def hides(entry: Entry[Any]) -> bool:
    return entry.traits.documents or entry.traits.padding or not entry.traits.bidirectional


def cases(entry: Entry[Any]) -> Iterator[tuple[str, Case]]:
    """The mixer, if it hides padding, with each of its cores."""
    if hides(entry):
        for name, config in settings(entry, "random", False):
            yield name, (entry, config)


def padded(lengths: tuple[int, ...], batch: Tokens) -> Tokens:
    padding = torch.arange(batch.ids.shape[1]) >= torch.tensor(lengths)[:, None]
    return Tokens.from_ids(batch.ids, padding.long(), padding=padding)


@check("mixer", subjects=cases)
def a_padded_sample_is_as_it_is_alone(case: Case) -> None:
    for causal in modes(case):
        mixer = built(case, causal=causal)
        x = drawn(len(LENGTHS), LENGTH, WIDTH)
        batch = padded(LENGTHS, tokens(LENGTH, batch=len(LENGTHS)))
        leaf, padding = x.clone().requires_grad_(), batch.padding
        assert padding is not None
        full = mixer(leaf, batch)
        assert full.isfinite().all(), "what stands at padding is read by norms"
        weights = drawn(*x.shape, seed=3)
        (slope,) = torch.autograd.grad((full * weights * ~padding[..., None]).sum(), leaf)
        for row, length in enumerate(LENGTHS):
            alone = x[row : row + 1, :length].clone().requires_grad_()
            out = mixer(alone, Tokens.from_ids(batch.ids[row : row + 1, :length]))
            assert close(full[row : row + 1, :length], out), (
                f"a text of {length} tokens sees its padding"
            )
            (wanted,) = torch.autograd.grad((out * weights[row : row + 1, :length]).sum(), alone)
            assert close(slope[row : row + 1, :length], wanted)
            assert close(slope[row, length:], torch.zeros_like(slope[row, length:]))


@check("mixer", lambda entry: not entry.traits.documents)
def packed_documents_are_refused_in_words(entry: Entry[Any]) -> None:
    case = (entry, example(entry))
    mixer = built(case, causal=modes(case)[0])
    numbers = (torch.arange(LENGTH) >= 30).long().expand(2, -1)
    refusal = ""
    try:
        mixer(drawn(2, LENGTH, WIDTH), tokens(LENGTH, documents=numbers))
    except ConfigError as error:
        refusal = str(error)
    assert "cannot mask packed documents from each other" in refusal, (
        "packed documents are taken, and not kept apart"
    )
