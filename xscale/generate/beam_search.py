"""Beam search with a length penalty (Wu et al. 2016, equation 14; Vaswani et al. 2017, section 6.1)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xscale.generate.decoders import incremental
from xscale.nn.head.head import ONLY_LAST_LOGITS
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt."""

    ids: tuple[int, ...]
    """Without the token that ends it."""
    score: float
    """Log-probability over the length penalty."""


PenaltyForm = Literal["wu", "power"]
"""wu: ((5 + length) / 6)^alpha (Wu et al. 2016); power: length^alpha (fairseq, Ott et al. 2019; transformers)."""


def length_penalty_of(length: int, alpha: float, form: PenaltyForm = "wu") -> float:
    """Return the number by which the log-probability of `length` tokens is divided."""
    return float(((5 + length) / 6 if form == "wu" else length) ** alpha)


@torch.no_grad()
def beam_search(
    model: nn.Module,
    prompt: Tensor,
    length: int,
    *,
    end: int,
    beams: int,
    length_penalty: float = 0.6,
    penalty_form: PenaltyForm = "wu",
    source: Tensor | None = None,
    window: int | None = None,
    prefix: bool = False,
) -> list[Hypothesis]:
    """Search the likeliest continuations of prompt ids [T] by up to `length` tokens; return up to `beams`, best first.

    In each step the 2 `beams` likeliest continuations by one token are looked at: those of the first `beams` that end
    are finished, and the `beams` likeliest that do not end go on, until none of them can have a better score than those
    that are finished. Where none ends, those that go on at the last step are returned. `length_penalty` is alpha of
    `length_penalty_of`, whose length includes the token `end`, and `penalty_form` its form. `source` [S]: input ids of
    an encoder-decoder. `window` is the longest sequence that the model's positions support. `prefix`: whether
    the prompt is a prefix, whose tokens see each other in both directions. On one process.
    """
    assert beams >= 1, "a search without beams"
    model.eval()
    limit = length if window is None else min(length, window - len(prompt))
    if limit < 1:
        return [Hypothesis((), 0.0)]
    step = _Step(model, source, len(prompt) if prefix else 0)
    live, scores = prompt[None], torch.zeros(1, dtype=torch.float64)
    finished: list[Hypothesis] = []
    best = length_penalty_of(limit, length_penalty, penalty_form)
    for written in range(1, limit + 1):
        total = scores[:, None] + step.log_probabilities(live)  # [K, V]
        kept: list[tuple[int, int, float]] = []
        for rank, (row, token, value) in enumerate(_likeliest(total, 2 * beams)):
            if token == end:
                if rank < beams:
                    ids = tuple(live[row, len(prompt) :].tolist())
                    penalty = length_penalty_of(written, length_penalty, penalty_form)
                    finished.append(Hypothesis(ids, value / penalty))
            elif len(kept) < beams:
                kept.append((row, token, value))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:beams]
        rows = torch.tensor([row for row, _, _ in kept], device=live.device)
        tokens = torch.tensor([token for _, token, _ in kept], device=live.device)
        live = torch.cat((live[rows], tokens[:, None]), 1)
        scores = torch.tensor([value for _, _, value in kept], dtype=torch.float64)
        if len(finished) == beams and float(scores.max()) / best <= finished[-1].score:
            break
    if finished:
        return finished
    texts = live[:, len(prompt) :].tolist()
    return [
        Hypothesis(tuple(ids), score / best)
        for ids, score in zip(texts, scores.tolist(), strict=True)
    ]


def _likeliest(scores: Tensor, count: int) -> list[tuple[int, int, float]]:
    """Return (row, token, score) of the `count` highest scores [K, V], the highest first."""
    values, candidates = scores.flatten().topk(min(count, scores.numel()))
    return [
        (*divmod(candidate, scores.shape[1]), value)
        for value, candidate in zip(values.tolist(), candidates.tolist(), strict=True)
    ]


class _Step:
    """Computes the next tokens of several hypotheses; a source is encoded once, where the model has a cache for it."""

    def __init__(self, model: nn.Module, source: Tensor | None, prefix: int) -> None:
        self.model = model
        self.source = source
        self.prefix = prefix
        self.has_cache = incremental(model)
        self.memory: Tensor | None = None

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities [K, V] of the token after each of `ids` [K, T], in float64 on the CPU."""
        count = len(ids)
        cache: dict[str, Any] | None = {} if self.has_cache else None
        if cache is not None and self.memory is not None:
            # Each hypothesis reads the same source; with layers before it [.., 1, S, D] -> [.., K, S, D].
            shape = [*self.memory.shape]
            shape[-3] = count
            cache["memory"] = self.memory.expand(shape)
        tokens = Tokens.from_ids(ids, cache=cache, signals={ONLY_LAST_LOGITS: True})
        if self.prefix:
            tokens = replace(tokens, prefix=tokens.positions < self.prefix)
        source = None if self.source is None else Tokens.from_ids(self.source.expand(count, -1))
        logits: Tensor = self.model(tokens, None, source)[:, -1]
        if cache is not None and self.memory is None and "memory" in cache:
            self.memory = cache["memory"][..., :1, :, :]
        return torch.log_softmax(logits.double().cpu(), -1)
