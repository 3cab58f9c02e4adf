"""Decoding of all tokens of a target at once, in a few iterations, by a model of kind `disentangled`.

`easy_first`: parallel easy-first of DisCo (Kasai et al. 2020, section 4); `mask_predict`: Ghazvininejad et al. 2019.
Both write a target of a given length, of which `decode_in_parallel` tries the likeliest.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xscale.nn.attention.ops.mask import OBSERVED
from xscale.nn.tokens import Tokens
from xscale.objective.disco import Disco

Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Tokens [N] and which each position observes, bool [N, N] -> the likeliest token of each position and its
log-probability, both [N]."""


def easy_first(predict: Predict, length: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities, both [N].

    The first iteration observes nothing and orders the positions from the likeliest to the least likely; in each later
    one a position observes the tokens of the iteration before at the positions ahead of it. It ends where no token
    changes, at the latest after N iterations.
    """
    nothing = torch.zeros(length, length, dtype=torch.bool)
    ids, scores = predict(torch.zeros(length, dtype=torch.long), nothing)
    ranks = scores.argsort(descending=True, stable=True).argsort()
    easier = ranks[None, :] < ranks[:, None]
    for _ in range(1, iterations):
        before = ids
        ids, scores = predict(ids, easier)
        if torch.equal(ids, before):
            break
    return ids, scores


def mask_predict(predict: Predict, length: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities, both [N].

    The first iteration observes nothing. Iteration t of T, from 1, predicts the N (T - t) / T positions with the lowest
    log-probability anew, from all others; those keep their tokens and log-probabilities.
    """
    nothing = torch.zeros(length, length, dtype=torch.bool)
    ids, scores = predict(torch.zeros(length, dtype=torch.long), nothing)
    for iteration in range(1, iterations):
        count = length * (iterations - iteration) // iterations
        if not count:
            break
        masked = torch.zeros(length, dtype=torch.bool)
        masked[scores.argsort(stable=True)[:count]] = True
        new_ids, new_scores = predict(ids, (~masked).expand(length, -1))
        ids, scores = torch.where(masked, new_ids, ids), torch.where(masked, new_scores, scores)
    return ids, scores


@torch.no_grad()
def decode_in_parallel(
    model: nn.Module, source: Tensor, objective: Disco, longest: int
) -> list[int]:
    """Write the target of source ids [S], of at most `longest` tokens, as the config of the objective says; return its
    ids before the end-of-document token. On one process. The model has a length head.
    """
    model.eval()
    config: Disco.Config = objective.config
    end = objective.specials.eos
    cache: dict[str, Tensor] = {}
    device = source.device

    def predict(ids: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        tokens = Tokens.from_ids(
            ids[None].to(device), cache=cache, signals={OBSERVED: observed[None].to(device)}
        )
        logits = model(tokens, None, Tokens.from_ids(source[None]))[0]  # [N, V]
        best = torch.log_softmax(logits.double().cpu(), -1).max(-1)
        return best.indices, best.values

    predict(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.bool))
    likeliest = (
        cache["lengths"][0, :longest].argsort(descending=True)[: config.length_candidates] + 1
    )
    refine = easy_first if config.decoding == "easy_first" else mask_predict
    targets = [refine(predict, length, config.iterations) for length in likeliest.tolist()]
    ids, _ = max(targets, key=lambda target: float(target[1].mean()))
    written: list[int] = ids.tolist()
    return written[: written.index(end)] if end in written else written
