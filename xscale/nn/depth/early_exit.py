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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.core.config import Config, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat
from xscale.core.errors import Problem
from xscale.core.requirements import at_most, take
from xscale.nn.signals import Signal


class ExitPolicyConfig(Config):
    criterion: Literal["entropy", "patience", "uncertainty", "vote"]
    """The quantity by which a token leaves: the entropy of its prediction, in nats (Xin et al. 2020); patience, the
    number of exits in a row that predict what the one before did (Zhou et al. 2020); uncertainty, the greatest entropy,
    over log V, of the tokens in a window around it (Li et al. 2021); or a vote of all exits so far (Sun et al.)."""
    threshold: NonNegativeFloat
    """entropy and uncertainty: a token leaves below it; patience and vote: from it on."""
    window: NonNegativeInt | None = None
    """uncertainty: the tokens on each side that must be certain too; in a causal model on the left alone."""
    power: Fraction | None = None
    """vote: the votes for the leading token are divided by this power of the number of votes."""
    tolerance: PositiveFloat | None = None
    """patience of an objective on scores, such as regress: an exit agrees with the one before if their scores are
    closer than this (Zhou et al. 2020)."""

    def check(self, exits: int, path: str) -> list[Problem]:
        """List what the policy cannot be in a stack of `exits` exits."""
        problems = []
        for key, criterion in (("window", "uncertainty"), ("power", "vote")):
            value, used = getattr(self, key), self.criterion == criterion
            if used and value is None:
                fix = "Other values work too."
                what = f"'{criterion}' needs it"
                problems.append(Problem(f"{path}.{key}", what, fix, choices=take(1)))
            if not used and value is not None:
                what = f"is not used by '{self.criterion}'"
                choices = take(None) + take(criterion, key=f"{path}.criterion")
                problems.append(Problem(f"{path}.{key}", what, choices=choices))
        if self.tolerance is not None and self.criterion != "patience":
            what = f"is not used by '{self.criterion}'"
            choices = take(None) + take("patience", key=f"{path}.criterion")
            problems.append(Problem(f"{path}.tolerance", what, choices=choices))
        return [*problems, *self.check_threshold(exits, f"{path}.threshold")]

    def check_threshold(self, exits: int, path: str) -> list[Problem]:
        """List why no token, or every token at once, would leave by this threshold."""
        value = self.threshold
        if not 0 <= value < math.inf:
            what = f"a threshold is a number from 0 on, got {value:g}"
            return [Problem(path, what, "Other values work too.", choices=take(1))]
        if self.criterion == "patience" and exits == 1:
            what = "patience counts the exits that agree with the one before, and there is one exit"
            exits_path, is_policy, _ = path.rpartition(".policy.threshold")
            choices = take("entropy", key=f"{exits_path}.policy.criterion")
            choices += take(None, key=f"{exits_path}.blocks")
            return [Problem(path, what, choices=choices if is_policy else ())]
        if self.criterion == "patience" and (value != int(value) or not 1 <= value <= exits - 1):
            what = f"patience is a count of exits, from 1 to {exits - 1} with {exits} exits, got {value:g}"
            return [Problem(path, what, choices=take(*range(1, exits)))]
        if self.criterion == "uncertainty" and value > 1:
            return [at_most(path, f"uncertainty is at most 1, got {value:g}", 1)]
        most = exits ** (1 - (self.power or 0.0))
        # Thresholds are shares of votes, which round otherwise.
        if self.criterion == "vote" and not 0 < value <= most * (1 + 1e-9):
            what = (
                f"the votes of {exits} exits are above 0 and reach at most {most:g}, got {value:g}"
            )
            return [Problem(path, what, "Other values between these work too.", choices=take(1))]
        return []

    def thresholds(self, exits: int, outputs: int) -> list[float]:
        """Return thresholds between all tokens leaving at the first exits and none, in the order of the computation.

        `outputs`: tokens of the vocabulary, or classes.
        """
        if self.criterion == "patience":
            return [float(count) for count in range(1, exits)]
        if self.criterion == "vote":
            power = self.power or 0.0
            return sorted(
                {
                    votes / cast**power
                    for cast in range(1, exits + 1)
                    for votes in range(1, cast + 1)
                }
            )
        most = 1.0 if self.criterion == "uncertainty" else math.log(outputs)
        return [most * share for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)]


class Shards(Protocol):
    """Reads of a sequence what other ranks have of it; one process has all."""

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        """Sum over the shards of a sequence."""

    def full_sequence(self, x: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
        """x [B, P, D] of a shard -> [B, T, D], and the places [P] of its tokens."""

    def of_tokens(self, values: Tensor) -> Tensor:
        """Values [B, T] of all tokens -> those of the tokens between the blocks."""


def vote_name(number: int) -> str:
    """Return the name of the votes of exit `number`, from 0, among the numbers that are handed on."""
    return f"vote{number}"


def numbers_handed_on(criterion: str, exits: int) -> tuple[str, ...]:
    """Return the names of the numbers of each token that `exits` exits hand on to those of the next pipeline stage."""
    if criterion == "patience":
        return ("left", "predicted", "count")
    return (
        ("left", *[vote_name(number) for number in range(exits)])
        if criterion == "vote"
        else ("left",)
    )


@dataclass
class EarlyExit:
    """The tokens of one forward at the exits: which have left, where, and with what prediction."""

    policy: ExitPolicyConfig
    pooled: Tensor | None = None
    """Bool [B, T], the token that predicts the class or score of its example, with which all others of the example
    leave; None: each token leaves by itself."""
    keeps_logits: bool = True
    """Whether what the exits predict is kept for the model's output; in training the states alone are."""
    left: Tensor | None = None
    """Bool [B, T]; None before the first exit."""
    blocks: Tensor | None = None
    """[B, T] blocks that a token that has left was computed in."""
    logits: Tensor | None = None
    """[B, T, V] logits of the exit at which a token left; None: they are not kept."""
    _memory: dict[str, Tensor] = field(default_factory=dict)
    """Numbers [B, T] of the exits so far, as far as the criterion needs them, by name."""
    _voters: list[Tensor] = field(default_factory=list)
    """Logits [B, T, V] of the exits so far, where they vote and are kept."""

    def handed_on(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the numbers [B, T] with these names that the exits of the next pipeline stage read, of those that
        `numbers_handed_on` has."""
        assert self.left is not None
        known = {**self._memory, "left": self.left}
        return {name: known[name] for name in names}

    def receive(self, numbers: Mapping[str, Tensor]) -> None:
        """Go on from what the exits of the previous pipeline stage have handed on."""
        scores = {"predicted"} if self.policy.tolerance is not None else set()
        self._memory = {
            name: value if name in scores else value.long() for name, value in numbers.items()
        }
        del self._memory["left"]
        self.left = numbers["left"] > 0
        # Which blocks they were computed in is read of an output alone.
        self.blocks = torch.zeros_like(self.left, dtype=torch.long)

    def all_left(self) -> bool:
        """Whether no token is computed any more."""
        return self.left is not None and bool(self.left.all())

    def reads_left(self) -> bool:
        """Whether later tokens read what the exits predict for these, also for those that have left."""
        return bool(self.policy.window)

    def keep(self, before: Tensor, after: Tensor, tokens: Any, shards: "Shards") -> Tensor:
        """Return the output `after` [B, M + T, D] of a block, with the input `before` of the tokens that have left.

        The first M tokens are global ones, which never leave.
        """
        if self.left is None:
            return after
        return torch.where(
            shards.of_tokens(with_global_tokens(self.left, tokens))[..., None], before, after
        )

    def observe(
        self, block: int, logits: Tensor, tokens: Any, *, causal: bool, shards: "Shards"
    ) -> None:
        """Let tokens leave at the exit after `block`, counted from 1, by its logits [B, T, V], or scores [B, T, 1].

        `shards` read of the sequence what other ranks have of it.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.left is None or self.blocks is None:
            self.left = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
            self.blocks = torch.zeros_like(self.left, dtype=torch.long)
        leaves = getattr(self, f"_{self.policy.criterion}")(logits, tokens, block, causal, shards)
        if self.pooled is not None:
            leaves = (shards.sum_over_sequence((leaves & self.pooled).sum(1)) > 0)[
                :, None
            ].expand_as(leaves)
        text = tokens.text_of_shard()
        leaves = leaves & ~self.left if text is None else leaves & ~self.left & text
        if self.keeps_logits:
            logits = self._vote_logits() if self.policy.criterion == "vote" else logits
            kept = torch.zeros_like(logits) if self.logits is None else self.logits
            self.logits = torch.where(leaves[..., None], logits, kept)
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
            self._cast(logits.to(self.logits.dtype))
            logits = self._vote_logits()
        self.blocks = torch.where(self.left, self.blocks, depth)
        return torch.where(self.left[..., None], self.logits, logits.to(self.logits.dtype))

    def _entropy(
        self, logits: Tensor, tokens: Any, block: int, causal: bool, shards: "Shards"
    ) -> Tensor:
        return entropy(logits) < self.policy.threshold

    def _patience(
        self, logits: Tensor, tokens: Any, block: int, causal: bool, shards: "Shards"
    ) -> Tensor:
        tolerance = self.policy.tolerance
        predicted = logits.argmax(-1) if tolerance is None else logits[..., 0]
        previous = self._memory.get("predicted")
        count = torch.zeros_like(predicted, dtype=torch.long)
        if previous is not None:
            agrees = (
                predicted == previous
                if tolerance is None
                else (predicted - previous).abs() < tolerance
            )
            count = torch.where(agrees, self._memory["count"] + 1, 0)
        self._memory |= {"predicted": predicted, "count": count}
        return count >= self.policy.threshold

    def _uncertainty(
        self, logits: Tensor, tokens: Any, block: int, causal: bool, shards: "Shards"
    ) -> Tensor:
        uncertainty = entropy(logits) / math.log(logits.shape[-1])
        reach, key = self.policy.window or 0, f"exits/{block}"
        before = uncertainty[:, :0]
        if tokens.forward.cache is not None and reach:
            before = tokens.forward.cache.get(key, before)
            tokens.forward.cache[key] = torch.cat((before, uncertainty), 1)[:, -reach:]
        if not reach:
            return uncertainty < self.policy.threshold
        # Global tokens predict nothing, but are in a shard between the blocks.
        after = tokens.global_tokens if uncertainty.shape[1] == tokens.ids.shape[1] else 0
        full, places = shards.full_sequence(uncertainty[..., None], tokens)
        documents = tokens.documents_of_sequence()
        if documents is not None:
            documents = documents[:, documents.shape[1] - full.shape[1] + after :]
        greatest = window_max(before, full[:, after:, 0], reach, causal=causal, documents=documents)
        # A shard may end in padding, of which nothing is read.
        greatest = F.pad(greatest, (after, 0))[:, places.clamp(max=after + greatest.shape[1] - 1)]
        return greatest < self.policy.threshold

    def _vote(
        self, logits: Tensor, tokens: Any, block: int, causal: bool, shards: "Shards"
    ) -> Tensor:
        self._cast(logits)
        votes = self._votes()
        share: Tensor = self._leading(votes)[0] / len(votes) ** (self.policy.power or 0.0)
        return share >= self.policy.threshold

    def _cast(self, logits: Tensor) -> None:
        """Add the votes of an exit, by its logits [B, T, V]."""
        self._memory[vote_name(len(self._memory))] = logits.argmax(-1)
        if self.keeps_logits:
            self._voters.append(logits)

    def _votes(self) -> Tensor:
        """Return the tokens that the exits so far voted for, [N, B, T]."""
        return torch.stack([self._memory[vote_name(number)] for number in range(len(self._memory))])

    @staticmethod
    def _leading(votes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of votes for the leading token, and that token, both [B, T], for all votes [N, B, T].

        Of tokens with equally many votes the one that the latest exit voted for leads.
        """
        counts = (votes[:, None] == votes[None]).sum(0)  # [N, B, T]
        most = counts.amax(0)
        order = torch.arange(len(votes), device=votes.device).view(-1, 1, 1)
        latest = torch.where(counts == most, order, -1).amax(0)  # [B, T]
        return most, votes.gather(0, latest[None])[0]

    def _vote_logits(self) -> Tensor:
        """Return the mean logits [B, T, V] of the exits that voted for the leading token."""
        votes = self._votes()
        most, leader = self._leading(votes)
        voted = (votes == leader)[..., None]
        return (torch.stack(self._voters) * voted).sum(0) / most[..., None]


EARLY_EXIT = Signal[EarlyExit]("early_exit.state")
"""State of the tokens at the exits of the stack; None: all blocks are computed for every token."""


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy [B, T], in nats, of the distributions with these logits [B, T, V]."""
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def with_global_tokens(numbers: Tensor, tokens: Any) -> Tensor:
    """Return numbers of the text [B, T] with zeros for the global tokens before it, [B, M + T]."""
    return F.pad(numbers, (tokens.ids.shape[1] - numbers.shape[1], 0))


def window_max(
    before: Tensor, values: Tensor, reach: int, *, causal: bool, documents: Tensor | None
) -> Tensor:
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
            shifted = F.pad(values, (reach, reach), value=lowest)[:, reach + past + offset :][
                :, :length
            ]
            if documents is not None:
                other = F.pad(documents, (reach, reach), value=-1)[:, reach + offset :][:, :length]
                shifted = torch.where(other == documents, shifted, lowest)
            greatest = torch.maximum(greatest, shifted)
    return greatest
