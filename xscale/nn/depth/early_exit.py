"""Early exit: policies by which a token leaves a stack at one of its exits, in evaluation and generation.

p_l [V] is the distribution that the exit after block l predicts for a token, and a token leaves at the first exit where

    entropy      H(p_l) < S                                       (Xin et al. 2020, DeeBERT)
    patience     cnt_l >= t                                       (Zhou et al. 2020, PABEE)
                 cnt_l = cnt_{l-1} + 1 if argmax p_l = argmax p_{l-1}, else 0;
                 of scores y_l: if |y_l - y_{l-1}| < tolerance
    uncertainty  max(u_{n-k} ... u_{n+k}) < S, u = H(p_l) / log V   (Li et al. 2021, TOKEE; n is the token)
    vote         max_c |{i <= l: argmax p_i = c}| / l^power >= S  (Sun et al. 2021; l counts the exits)

The hidden state of a token that has left is copied to all later blocks, where other tokens attend to it (Li et al.).
An example whose class or score one of its tokens predicts leaves as a whole, when that token leaves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xscale.core.config import Config
from xscale.core.errors import Problem
from xscale.nn.signals import Signal


class ExitPolicyConfig(Config):
    criterion: Literal["entropy", "patience", "uncertainty", "vote"]
    """The quantity by which a token leaves: the entropy of its prediction, in nats (Xin et al. 2020); patience, the
    number of exits in a row that predict what the one before did (Zhou et al. 2020); uncertainty, the greatest entropy,
    over log V, of the tokens in a window around it (Li et al. 2021); or a vote of all exits so far (Sun et al.)."""
    threshold: float = Field(ge=0)
    """entropy and uncertainty: a token leaves below it; patience and vote: from it on."""
    window: int | None = Field(default=None, ge=0)
    """uncertainty: the tokens on each side that must be certain too; in a causal model on the left alone."""
    power: float | None = Field(default=None, ge=0, le=1)
    """vote: the votes for the leading token are divided by this power of the number of votes."""
    tolerance: float | None = Field(default=None, gt=0)
    """patience of an objective on scores, such as regress: an exit agrees with the one before if their scores are
    closer than this (Zhou et al. 2020)."""

    def check(self, exits: int, path: str) -> list[Problem]:
        """List what the policy cannot be in a stack of `exits` exits."""
        problems = []
        for key, criterion in (("window", "uncertainty"), ("power", "vote")):
            value, used = getattr(self, key), self.criterion == criterion
            if used and value is None:
                problems.append(Problem(f"{path}.{key}", f"'{criterion}' needs it", "Take such as 1."))
            if not used and value is not None:
                what = f"is not used by '{self.criterion}'"
                problems.append(Problem(f"{path}.{key}", what, f"Take null, or criterion={criterion}."))
        if self.tolerance is not None and self.criterion != "patience":
            what = f"is not used by '{self.criterion}'"
            problems.append(Problem(f"{path}.tolerance", what, "Take null, or criterion=patience."))
        return [*problems, *self.check_threshold(exits, f"{path}.threshold")]

    def check_threshold(self, exits: int, path: str) -> list[Problem]:
        """List why no token, or every token at once, would leave by this threshold."""
        value = self.threshold
        if not 0 <= value < math.inf:
            return [Problem(path, f"a threshold is a number from 0 on, got {value:g}", "Take such as 1.")]
        if self.criterion == "patience" and (value != int(value) or not 1 <= value <= exits - 1):
            what = f"patience is a count of exits, from 1 to {exits - 1} with {exits} exits, got {value:g}"
            fix = f"Take 1 to {exits - 1}." if exits > 1 else "Take at least two exits."
            return [Problem(path, what, fix)]
        if self.criterion == "uncertainty" and value > 1:
            return [Problem(path, f"uncertainty is at most 1, got {value:g}", "Take 0 to 1.")]
        most = exits ** (1 - (self.power or 0.0))
        if self.criterion == "vote" and not 0 < value <= most:
            what = f"the votes of {exits} exits reach at most {most:g}, got {value:g}"
            return [Problem(path, what, f"Take above 0, up to {most:g}.")]
        return []

    def thresholds(self, exits: int, outputs: int) -> list[float]:
        """Return thresholds between all tokens leaving at the first exits and none, in the order of the computation.

        `outputs`: tokens of the vocabulary, or classes.
        """
        if self.criterion == "patience":
            return [float(count) for count in range(1, exits)]
        if self.criterion == "vote":
            power = self.power or 0.0
            return sorted({votes / cast**power for cast in range(1, exits + 1) for votes in range(1, cast + 1)})
        most = 1.0 if self.criterion == "uncertainty" else math.log(outputs)
        return [most * share for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)]


@dataclass
class EarlyExit:
    """The tokens of one forward at the exits: which have left, where, and with what prediction."""

    policy: ExitPolicyConfig
    pooled: Tensor | None = None
    """Bool [B, T], the token that predicts the class or score of its example, with which all others of the example
    leave; None: each token leaves by itself."""
    left: Tensor | None = None
    """Bool [B, T]; None before the first exit."""
    blocks: Tensor | None = None
    """[B, T] blocks that a token that has left was computed in."""
    logits: Tensor | None = None
    """[B, T, V] logits of the exit at which a token left."""
    _memory: dict[str, Any] = field(default_factory=dict)
    """Predictions of the exits so far, as far as the criterion needs them."""

    def all_left(self) -> bool:
        """Whether no token is computed any more."""
        return self.left is not None and bool(self.left.all())

    def reads_left(self) -> bool:
        """Whether later tokens read what the exits predict for these, also for those that have left."""
        return bool(self.policy.window)

    def keep(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the output `after` [B, M + T, D] of a block, with the input `before` of the tokens that have left.

        The first M tokens are global ones, which never leave.
        """
        if self.left is None:
            return after
        left = F.pad(self.left, (after.shape[1] - self.left.shape[1], 0))
        return torch.where(left[..., None], before, after)

    def observe(
        self,
        block: int,
        logits: Tensor,
        tokens: Any,
        *,
        causal: bool,
        sum_over_sequence: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """Let tokens leave at the exit after `block`, counted from 1, by its logits [B, T, V], or scores [B, T, 1].

        `sum_over_sequence` sums over the shards of a sequence what each of them has [B].
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.left is None or self.blocks is None or self.logits is None:
            self.left = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
            self.blocks = torch.zeros_like(self.left, dtype=torch.long)
            self.logits = torch.zeros_like(logits)
        leaves = getattr(self, f"_{self.policy.criterion}")(logits, tokens, block, causal)
        if self.pooled is not None:
            leaves = (sum_over_sequence((leaves & self.pooled).sum(1)) > 0)[:, None].expand_as(leaves)
        leaves = leaves & ~self.left
        if self.policy.criterion == "vote":
            logits = self._majority()[1]
        self.logits = torch.where(leaves[..., None], logits, self.logits)
        self.blocks = torch.where(leaves, block, self.blocks)
        self.left = self.left | leaves

    def finish(self, depth: int, last_logits: Callable[[], Tensor]) -> Tensor:
        """Return the logits [B, T, V] of all tokens; `last_logits` computes those of the model's head."""
        if self.all_left() and self.logits is not None:
            return self.logits
        logits = last_logits()
        if self.left is None or self.blocks is None or self.logits is None:
            return logits
        if self.policy.criterion == "vote":
            logits = self._vote_logits(logits)
        self.blocks = torch.where(self.left, self.blocks, depth)
        return torch.where(self.left[..., None], self.logits, logits.to(self.logits.dtype))

    def _entropy(self, logits: Tensor, tokens: Any, block: int, causal: bool) -> Tensor:
        return entropy(logits) < self.policy.threshold

    def _patience(self, logits: Tensor, tokens: Any, block: int, causal: bool) -> Tensor:
        tolerance = self.policy.tolerance
        predicted = logits.argmax(-1) if tolerance is None else logits[..., 0]
        previous = self._memory.get("predicted")
        count = torch.zeros_like(predicted, dtype=torch.long)
        if previous is not None:
            agrees = predicted == previous if tolerance is None else (predicted - previous).abs() < tolerance
            count = torch.where(agrees, self._memory["count"] + 1, 0)
        self._memory |= {"predicted": predicted, "count": count}
        return count >= self.policy.threshold

    def _uncertainty(self, logits: Tensor, tokens: Any, block: int, causal: bool) -> Tensor:
        uncertainty = entropy(logits) / math.log(logits.shape[-1])
        reach, key = self.policy.window or 0, f"exits/{block}"
        before = uncertainty[:, :0]
        if tokens.forward.cache is not None and reach:
            before = tokens.forward.cache.get(key, before)
            tokens.forward.cache[key] = torch.cat((before, uncertainty), 1)[:, -reach:]
        return window_max(before, uncertainty, reach, causal=causal, documents=tokens.documents) < self.policy.threshold

    def _vote(self, logits: Tensor, tokens: Any, block: int, causal: bool) -> Tensor:
        self._memory.setdefault("votes", []).append(logits)
        count, _ = self._majority()
        cast = len(self._memory["votes"])
        share: Tensor = count / cast ** (self.policy.power or 0.0)
        return share >= self.policy.threshold

    def _vote_logits(self, logits: Tensor) -> Tensor:
        self._memory["votes"].append(logits.to(self._memory["votes"][0].dtype))
        return self._majority()[1]

    def _majority(self) -> tuple[Tensor, Tensor]:
        """Return the votes [B, T] for the leading token, and the mean logits [B, T, V] of those who voted for it.

        Of tokens with equally many votes the one that the latest exit voted for leads.
        """
        votes = torch.stack(self._memory["votes"])  # [N, B, T, V]
        predicted = votes.argmax(-1)  # [N, B, T]
        counts = (predicted[:, None] == predicted[None]).sum(0)  # [N, B, T]
        most = counts.amax(0)
        order = torch.arange(len(votes), device=votes.device).view(-1, 1, 1)
        latest = torch.where(counts == most, order, -1).amax(0)  # [B, T]
        leader = predicted.gather(0, latest[None])[0]
        voted = (predicted == leader)[..., None]
        return most, (votes * voted).sum(0) / most[..., None]


EARLY_EXIT = Signal[EarlyExit]("early_exit.state")
"""State of the tokens at the exits of the stack; None: all blocks are computed for every token."""


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy [B, T], in nats, of the distributions with these logits [B, T, V]."""
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def window_max(before: Tensor, values: Tensor, reach: int, *, causal: bool, documents: Tensor | None) -> Tensor:
    """Return the greatest of the values [B, T] of each token and `reach` tokens on each side, causal: on the left.

    `before` [B, P] are the values of tokens before these. With `documents` [B, T] a window stays within its document.
    """
    past, length = before.shape[1], values.shape[1]
    greatest = values
    if causal:
        values = torch.cat((before, values), 1)
    else:
        past = 0
    lowest = float("-inf")
    for step in range(1, reach + 1):
        for offset in (-step,) if causal else (-step, step):
            shifted = F.pad(values, (reach, reach), value=lowest)[:, reach + past + offset :][:, :length]
            if documents is not None:
                other = F.pad(documents, (reach, reach), value=-1)[:, reach + offset :][:, :length]
                shifted = torch.where(other == documents, shifted, lowest)
            greatest = torch.maximum(greatest, shifted)
    return greatest
