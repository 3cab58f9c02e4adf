"""Training objectives: they turn packed samples into inputs and targets, and compute the loss."""

from xscale.objective import (
    cpc,
    denoising,
    disco,
    fill_in_middle,
    labelled,
    masked,
    masked_sentences,
    objective,
    prefix_lm,
    seq2seq,
    span,
    span_boundary,
    ul2,
    ul2_decoder,
)

__all__ = [
    "cpc",
    "denoising",
    "disco",
    "fill_in_middle",
    "labelled",
    "masked",
    "masked_sentences",
    "objective",
    "prefix_lm",
    "seq2seq",
    "span",
    "span_boundary",
    "ul2",
    "ul2_decoder",
]
