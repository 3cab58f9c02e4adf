"""Exits: heads after inner blocks of a stack, whose losses train it together with the loss of the model's own head.

    L = sum_l w_l CE(f_l(h_l), y),  w_l = 1 or l / (sum of the l)

h_l [B, T, D] are the hidden states after block l, from 1, and f_l is a norm with a head; l goes through the exits and
the last block, after which the model's own head predicts. Weights that grow linearly are those of Zhou et al. 2020.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from xscale.core.config import Config
from xscale.core.errors import Problem
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.early_exit import ExitPolicyConfig
from xscale.nn.head import Head
from xscale.nn.module import Module
from xscale.nn.norm import Norm
from xscale.nn.tokens import Tokens


class ExitsConfig(Config):
    blocks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """Numbers of the blocks, from 0, after which there is an exit; null: all but the last, which the model's own head
    follows."""
    head: Literal["own", "shared"] = "own"
    """own: each exit has a head of its own; shared: all exits predict by the model's head."""
    norm: bool = True
    """Whether each exit has a norm of its own, of the blocks' kind, before its head."""
    weights: Literal["equal", "linear"] = "equal"
    """Weights of the losses. equal: 1 for each exit and for the model's head; linear: l / (sum of the l) for the loss
    after block l, counted from 1 (Zhou et al. 2020)."""
    policy: ExitPolicyConfig | None = None
    """When a token leaves at an exit in generation and in `xscale eval --exits`; null: never. Training and other
    evaluations compute all blocks."""

    def after(self, depth: int) -> tuple[int, ...]:
        """Return the blocks with an exit, from 0, in a stack of `depth` blocks."""
        return tuple(range(depth - 1)) if self.blocks is None else self.blocks


@dataclass(frozen=True)
class Prediction:
    """The prediction task of a forward, which the exits share with the model's head."""

    head: nn.Module
    """The model's head."""
    targets: Tensor | None
    """[B, T] token ids; None: no loss is asked for."""


class Exit(Module):
    """The norm and the head after one block."""

    def __init__(self, norm: Norm | None, head: Head | None) -> None:
        """`head` None: the model's."""
        super().__init__()
        self.norm = norm
        self.head = head

    def forward(self, x: Tensor, targets: Tensor | None, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Hidden states [B, T, D] -> the loss of targets [B, T], summed, in nats; without targets logits [B, T, V]."""
        head = prediction.head if self.head is None else self.head
        out: Tensor = head(x if self.norm is None else self.norm(x), targets, tokens)
        return out


class Exits(Module):
    """The exits of a stack, by the number of their block, and the weights of the losses."""

    seams: ClassVar[tuple[str, ...]] = ("sum_over_sequence", "weigh_last")

    def __init__(
        self, config: ExitsConfig, dims: Dims, norm: Callable[[], Norm], make_head: Callable[[], Head]
    ) -> None:
        """`norm` and `make_head` build the parts of one exit."""
        super().__init__()
        self.config, self.depth, self.causal = config, dims.depth, dims.causal
        depth = dims.depth
        after = config.after(depth)
        self.at = nn.ModuleDict(
            {
                str(layer): Exit(norm() if config.norm else None, make_head() if config.head == "own" else None)
                for layer in after
            }
        )
        total = sum(layer + 1 for layer in after) + depth
        linear = config.weights == "linear"
        self.weights = {layer: (layer + 1) / total if linear else 1.0 for layer in after}
        """Weight of the loss of each exit, by its block."""
        self.last_weight = depth / total if linear else 1.0
        """Weight of the loss of the model's own head."""

    @staticmethod
    def check(config: ExitsConfig | None, depth: int, path: str, *, refused: str | None) -> list[Problem]:
        """List what the exits of a stack of `depth` blocks cannot be; `refused` says why a stack can have none."""
        if config is None:
            return []
        if refused is not None:
            return [Problem(path, refused, "Take null.")]
        if depth == 1:
            return [Problem(path, "the model's head follows the only block", "Take null, or a deeper stack.")]
        after = config.after(depth)
        where, problems = f"{path}.blocks", []
        beyond = [layer for layer in after if layer >= depth - 1]
        if beyond:
            what = f"a stack of {depth} has no inner block {beyond[0]}; the model's head follows its last block"
            problems.append(Problem(where, what, f"Take blocks from 0 to {depth - 2}, or null."))
        if list(after) != sorted(set(after)):
            problems.append(Problem(where, "the blocks must ascend", f"Take {sorted(set(after))}."))
        policy = config.policy
        return problems + ([] if policy is None else policy.check(len(after), f"{path}.policy"))

    def attach_loss(self, layer: int, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return x [B, T, D], the output of block `layer`, with the loss of its exit attached; without an exit x."""
        targets = prediction.targets
        if str(layer) not in self.at or targets is None or tokens.target_weight is None:
            return x
        loss = self.at[str(layer)](x, targets, tokens, prediction)
        self._record(layer, loss, tokens)
        return attach(x, loss, self.weights[layer] * tokens.target_weight)

    def leave(self, layer: int, x: Tensor, tokens: Tokens, prediction: Prediction) -> None:
        """Let tokens leave by `tokens.early_exit` after block `layer`, whose output is x [B, M + T, D]."""
        if tokens.early_exit is not None and str(layer) in self.at:
            logits = self.at[str(layer)](x, None, replace(tokens, only_last_logits=False), prediction)
            tokens.early_exit.observe(layer + 1, logits, tokens, causal=self.causal)

    def logits(self, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return the logits [B, T, V] of tokens that may have left; x [B, M + T, D] is the output of the stack."""
        assert tokens.early_exit is not None, "no token can leave"
        every = replace(tokens, only_last_logits=False)
        return tokens.early_exit.finish(self.depth, lambda: prediction.head(x, None, every))

    def weigh_last(self, loss: Tensor, tokens: Tokens) -> Tensor:
        """Return the loss of the model's own head with its weight in the gradient; the value stays.

        A seam: a pipeline stage without that head has no loss of it.
        """
        if tokens.target_weight is None or self.last_weight == 1:
            return loss
        return loss.detach() + self.last_weight * (loss - loss.detach())

    def _record(self, layer: int, loss: Tensor, tokens: Tokens) -> None:
        """Record the mean loss of an exit over all targets of the step, as a mean over its micro-batches."""
        if tokens.stats is None or tokens.aux_loss_weight is None or tokens.target_weight is None:
            return
        total = self.sum_over_sequence(loss.detach())
        tokens.stats.add(f"{self.at[str(layer)].path}/loss", total * (tokens.target_weight / tokens.aux_loss_weight))

    def sum_over_sequence(self, nats: Tensor) -> Tensor:
        """Sum a loss over the tokens of all sequences. A seam: a sequence may be sharded."""
        return nats


def no_exits(stack: Any, *, predicts: bool, hands_on_scores: bool) -> str | None:
    """Return why a stack of this config (`StackConfig`) can have no exits; None: it can."""
    if not predicts:
        return "exits are for a decoder or an encoder alone; an encoder-decoder predicts from its last block"
    if stack.exits is not None and stack.exits.policy is not None and hands_on_scores:
        return "a token that has left has no attention scores to hand on to the next block"
    if stack.halting is not None:
        return "the output is a mean over the blocks in which a token was computed, and an exit would read one block's"
    return None
