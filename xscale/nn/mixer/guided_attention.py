"""Deshpande and Narasimhan 2020 (attention guidance): a loss pulls the weights of some heads towards fixed patterns.

    L = lambda sum_h ||A_h - P_h||_F^2

summed over the guided heads of each layer, and averaged over the sequences of a micro-batch. P has, in the row of each
token, weight 1 on the next token, the previous one or the first of the document, or equal weights on all delimiters or
all periods that the token sees. Rows for which there is no such token are left out.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import NonNegativeFloat, NonNegativeInt
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import CAUSAL_OR_BIDIRECTIONAL, MIXERS
from xscale.nn.tokens import Tokens

Pattern = Literal["next", "previous", "first", "delimiter", "period"]
TokenId = NonNegativeInt


@MIXERS.register(
    "guided_attention",
    traits=replace(CAUSAL_OR_BIDIRECTIONAL, prefix=True),
    deviations=(
        "The weight of the loss falls linearly with the steps (guidance_until), or is constant; that the paper's decay "
        "is linear is not verified.",
        "Rows without a token that the pattern names are left out.",
    ),
)
class GuidedAttention(Attention):
    reads_progress = True

    class Config(Attention.Config):
        patterns: tuple[Pattern, ...] = Field(default=("previous", "first"), min_length=1)
        """Patterns of the first heads of the layer, one each; the other heads are not guided. previous, next: the
        neighbour; first: the document's first token ([CLS]); delimiter ([SEP]), period: the tokens of these ids."""
        delimiter_ids: tuple[TokenId, ...] = ()
        """Token ids of the delimiters."""
        period_ids: tuple[TokenId, ...] = ()
        """Token ids of the periods."""
        guidance_weight: NonNegativeFloat = 1.0
        """Lambda, weight of the loss, at the beginning of a run."""
        guidance_until: float | None = Field(default=None, gt=0, le=1)
        """Fraction of the run's steps after which the weight is 0: it falls linearly until then, as the paper's decays
        during pre-training. null: it is constant."""

    cores = ("softmax",)
    shards_sequence = False
    averages_tokens = True
    averages_text = True
    averages_packed_text = True

    reads_bias = True

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.all_heads = config.heads
        self.patterns, self.guidance_weight = config.patterns, config.guidance_weight
        self.guidance_until = config.guidance_until
        self.ids = {"delimiter": config.delimiter_ids, "period": config.period_ids}

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = super().check(config, dims, path)
        if len(config.patterns) > config.heads:
            what = f"{len(config.patterns)} patterns are more than heads={config.heads}"
            fewer = take(list(config.patterns[: config.heads]))
            problems.append(Problem(f"{path}.patterns", what, choices=fewer))
        if "next" in config.patterns and dims.causal:
            what = "'next' guides to later tokens, which a causal model hides"
            earlier = [pattern for pattern in config.patterns if pattern != "next"]
            problems.append(Problem(f"{path}.patterns", what, choices=take(earlier)))
        for pattern in ("delimiter", "period"):
            ids = getattr(config, f"{pattern}_ids")
            where = f"{path}.{pattern}_ids"
            if pattern in config.patterns and not ids:
                with_ids = [other for other in config.patterns if other != pattern]
                what, fix = f"the pattern '{pattern}' has no token ids", "Or give the tokenizer's."
                without = take(with_ids, key=f"{path}.patterns")
                problems.append(Problem(where, what, fix, choices=without))
            if bad := [index for index in ids if index >= dims.vocabulary]:
                what = (
                    f"{bad[0]} is no token id of a vocabulary of {dims.vocabulary}, "
                    f"whose ids are 0 to {dims.vocabulary - 1}"
                )
                known = [index for index in ids if index < dims.vocabulary]
                problems.append(Problem(where, what, choices=take(known)))
        return problems

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        o = self.attend(q, k, v, mask)
        guidance_weight = self.weight_at(tokens.forward.progress)
        if tokens.forward.aux_loss_weight is None or not guidance_weight:
            return o
        assert isinstance(self.core, Softmax)
        weights = self.core.attention_weights(q, k, mask)  # [B, H, T, S]
        first, local = self.core.first_head, q.shape[1]
        distances = [
            pattern_distance(
                weights[:, head - first], self.chosen(self.patterns[head], tokens, mask)
            )
            for head in range(first, min(first + local, len(self.patterns)))
        ]
        # A rank's share of the loss is weighted as if it had all heads.
        factor = guidance_weight * self.all_heads / local
        # A rank without a guided head joins the others' collectives in backward.
        loss = factor * (torch.stack(distances).sum() if distances else 0.0 * weights.sum())
        return attach(o, loss, tokens.forward.aux_loss_weight)

    def weight_at(self, progress: float | None) -> float:
        """Return lambda after the fraction `progress` of the run's steps; None: there is no run."""
        if self.guidance_until is None or progress is None:
            return self.guidance_weight
        return self.guidance_weight * max(0.0, 1 - progress / self.guidance_until)

    def chosen(self, pattern: Pattern, tokens: Tokens, mask: AttentionMask) -> Tensor:
        """Return the keys that the pattern names for each query, of those it sees: bool [B, T, S]."""
        places = (
            tokens.positions[:, None, :] - tokens.positions[:, :, None]
        )  # [B, T, S], key - query
        if pattern == "previous":
            chosen = places == -1
        elif pattern == "next":
            chosen = places == 1
        elif pattern == "first":
            chosen = (tokens.positions == 0)[:, None, :].expand_as(places)
        else:
            ids = torch.tensor(self.ids[pattern], device=tokens.ids.device)
            chosen = torch.isin(tokens.ids, ids)[:, None, :].expand_as(places)
        if mask.allowed is not None:
            chosen = chosen & mask.allowed.to(chosen.device)[:, 0]
        if (padding := tokens.any_padding()) is not None:
            chosen = chosen & ~padding[:, :, None]
        return chosen


def pattern_distance(weights: Tensor, chosen: Tensor) -> Tensor:
    """Return ||A - P||_F^2, the mean over B, of weights A [B, T, S] and P, whose rows are even on the chosen keys."""
    pattern = chosen.to(weights.dtype) / chosen.sum(-1, keepdim=True).clamp(min=1)
    guided = chosen.any(-1)  # [B, T]
    return ((weights - pattern).square().sum(-1) * guided).sum(-1).mean()
