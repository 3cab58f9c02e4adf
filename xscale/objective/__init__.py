"""Training objectives: they turn packed samples into inputs and targets, and compute the loss."""

from xscale.objective import (
    labelled,
    masked,
    objective,
    seq2seq,
    span,
)

__all__ = [
    "labelled",
    "masked",
    "objective",
    "seq2seq",
    "span",
]
