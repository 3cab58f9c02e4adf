"""Exits: heads after inner blocks of a stack, whose losses train it together with the loss of the model's own head.

    L = sum_l w_l CE(f_l(h_l), y),  w_l = 1 or l / (sum of the l)

h_l [B, T, D] are the hidden states after block l, from 1, and f_l is a norm with a head; l goes through the exits and
the last block, after which the model's own head predicts. Weights that grow linearly are those of Zhou et al. 2020.
With diversity (Sun et al. 2021) alpha mean_{j<l} CE(p_l, p_j) is subtracted for each l, CE(p, q) = -sum_c q_c log p_c.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed
from xscale.nn.auxiliary import attach
from xscale.nn.depth.depth_pass import DepthPass, DepthState, Prediction, SentTensor, StackUse
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, numbers_handed_on, with_global_tokens
from xscale.nn.depth.exits_config import ExitsConfig, check_exits
from xscale.nn.dims import Dims
from xscale.nn.head.head import IGNORE_INDEX, ONLY_LAST_LOGITS, Head
from xscale.nn.module import Module
from xscale.nn.norm.norm import NORMS, Norm
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class Exit(Module):
    """The norm and the head after one block."""

    seams = {"norm": Role.BETWEEN_REGIONS}

    def __init__(self, norm: Norm | None, head: Head | None) -> None:
        """`head` None: the model's."""
        super().__init__()
        self.norm = norm
        self.head = head

    def forward(
        self, x: Tensor, targets: Tensor | None, tokens: Tokens, prediction: Prediction
    ) -> Tensor:
        """Hidden states [B, T, D] -> the loss of targets [B, T], summed, in nats; without targets logits [B, T, V]."""
        head = prediction.head if self.head is None else self.head
        out: Tensor = head(x if self.norm is None else self.norm(x), targets, tokens)
        return out


class Exits(DepthPass):
    """The exits of a stack, by the number of their block, and the weights of the losses."""

    reads_progress = True

    key = "exits"
    reads_hidden_states = "an exit reads one"
    seams = {
        "sum_over_sequence": Role.SUM_OVER_TOKENS,
        "full_sequence": Role.FULL_SEQUENCE,
        "of_tokens": Role.SHARD_OF_TOKENS,
        "replicated_input": Role.REPLICATED_INPUT,
        "second_targets": Role.TARGETS_AHEAD,
        "weigh_last": Role.ON_LAST_STAGE,
        "second": Role.ON_LAST_STAGE,
    }

    def __init__(
        self,
        config: ExitsConfig,
        dims: Dims,
        norm: Callable[[], Norm],
        make_head: Callable[[], Head],
    ) -> None:
        """`norm` and `make_head` build the parts of one exit."""
        super().__init__()
        self.config = config
        self.depth = dims.depth
        self.causal = dims.causal
        depth = dims.depth
        after = config.after(depth)
        self.at = nn.ModuleDict()
        for layer in after:
            head = make_head() if config.head == "own" else None
            self.at[str(layer)] = Exit(norm() if config.norm else None, head)
        self.second: Exit | None = Exit(None, make_head()) if config.second_target else None
        """Predicts the token after the next; None: nothing does, or another pipeline stage."""
        total = sum(layer + 1 for layer in after) + depth
        linear = config.weights == "linear"
        self.is_last = True
        """Whether the last block is here, and not in a later stage of a pipeline."""
        self.per_example = False
        """Whether one token predicts for its example, which leaves as a whole."""
        self.weights = {layer: (layer + 1) / total if linear else 1.0 for layer in after}
        """Weight of the loss of each exit, by its block."""
        self.last_weight = depth / total if linear else 1.0
        """Weight of the loss of the model's own head."""

    def needs(self) -> list[KeyNeed]:
        if not self.config.diversity:
            return []
        read = "the diversity of exits reads the predictions of earlier ones, and stages do not pass on logits"
        return [KeyNeed("parallel.mesh.pp", (1,), read, ((".diversity", 0.0),))]

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "Exits | None":
        if config.exits is None:
            return None
        assert use.make_head is not None, "`check` refuses exits of a stack without a head"
        return cls(
            config.exits, dims, lambda: NORMS.build(config.block.norm, dims.width), use.make_head
        )

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        return check_exits(config, dims, path, use)

    def replace_heads(self, make_head: Callable[[], Any]) -> None:
        self.per_example = make_head().per_example
        for part in self.at.values():
            if part.head is not None:
                part.head = make_head()

    def heads_after_blocks(self) -> dict[int, Any]:
        return {int(layer): part for layer, part in self.at.items()}

    def keep_blocks(self, layers: Sequence[str]) -> None:
        self.is_last = str(self.depth - 1) in layers
        for layer in [layer for layer in self.at if layer not in layers]:
            del self.at[layer]

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        return {
            f"{self.key}.{name}": SentTensor(per_token=True) for name in self._numbers(len(before))
        }

    def _numbers(self, blocks: int) -> tuple[str, ...]:
        """Return the names of the numbers of each token that so many blocks hand on to the next pipeline stage."""
        exits = sum(layer < blocks for layer in self.weights)
        if self.config.self_sampling is None or self.config.policy is None or not exits:
            return ()
        return numbers_handed_on(self.config.policy.criterion, exits)

    def start(self, state: DepthState) -> None:
        """Begin with no token that has left; in a pipeline stage with those that have left before."""
        leaving = self.leaving(state.tokens, state.prediction)
        prefix = f"{self.key}."
        received = {
            name[len(prefix) :]: edge
            for name, edge in state.edges.items()
            if name.startswith(prefix)
        }
        state.edges = {
            name: edge for name, edge in state.edges.items() if not name.startswith(prefix)
        }
        if leaving is not None and received:
            assert state.prediction is not None
            assert state.prediction.targets is not None, "tokens leave in training"
            # Before the text there may be global tokens.
            length = state.prediction.targets.shape[1]
            full = {
                name: self.replicated_input(edge[..., None], state.tokens)
                for name, edge in received.items()
            }
            leaving.receive({name: edge[:, -length:, 0] for name, edge in full.items()})
        state.kept[self.key] = leaving

    def finish(self, state: DepthState) -> None:
        """Hand on to the next pipeline stage which tokens have left, and what lets others leave."""
        if self.is_last:
            return
        leaving: EarlyExit | None = state.kept[self.key]
        names = self._numbers(state.layer + 1)
        dtype = torch.promote_types(state.x.dtype, torch.float32)
        none = state.x.new_zeros(state.x.shape[:-1], dtype=dtype)
        numbers = {} if leaving is None or leaving.left is None else leaving.handed_on(names)
        for name in names:
            value = none
            if name in numbers:
                value = self.of_tokens(with_global_tokens(numbers[name], state.tokens)).to(dtype)
            state.edges[f"{self.key}.{name}"] = value

    def before_block(self, state: DepthState) -> None:
        leaving: EarlyExit | None = state.kept[self.key]
        if leaving is not None and state.tokens.forward.target_weight is None:
            state.only_fills_cache = state.only_fills_cache or leaving.all_left()

    def after_block(self, state: DepthState) -> None:
        """Keep the states of tokens that have left, attach the loss of the exit, and let further tokens leave."""
        leaving: EarlyExit | None = state.kept[self.key]
        if leaving is not None:
            state.x = leaving.keep(state.before, state.x, state.tokens, self)
        if state.prediction is None:
            return
        state.x = self.attach_loss(state.layer, state.x, state.tokens, state.prediction)
        # Later tokens may read what an exit predicts for these.
        is_read = (
            state.tokens.forward.cache is not None and leaving is not None and leaving.reads_left()
        )
        if leaving is not None and (is_read or not state.only_fills_cache):
            self.leave(state.layer, state.x, state.tokens, state.prediction, leaving)

    def predict(
        self, x: Tensor, tokens: Tokens, prediction: Prediction, head: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if tokens.get(EARLY_EXIT) is not None and prediction.targets is None:
            return self.logits(x, tokens, prediction)
        out = head(self.attach_second(x, tokens, prediction))
        return out if prediction.targets is None else self.weigh_last(out, tokens)

    def attach_loss(self, layer: int, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return x [B, T, D], the output of block `layer`, with the loss of its exit attached; without an exit x."""
        targets = prediction.targets
        if str(layer) not in self.at or targets is None or tokens.forward.target_weight is None:
            return x
        part = self.at[str(layer)]
        if not self.is_trained(layer, tokens):
            # The metrics have the same columns in all steps: stages of a pipeline rely on it.
            with torch.no_grad():
                self._record(part, part(x, targets, tokens, prediction), tokens)
            return x
        read = x if self.config.two_stage is None else x.detach()
        loss = part(read, targets, tokens, prediction)
        self._record(part, loss, tokens)
        x = attach(x, loss, self.weights[layer] * tokens.forward.target_weight)
        return self._attach_diversity(part, x, tokens, prediction)

    def leaving(self, tokens: Tokens, prediction: Prediction | None) -> EarlyExit | None:
        """Return the state of the tokens of a forward that may leave; None: all blocks are computed for every token."""
        since, policy = self.config.self_sampling, self.config.policy
        if (
            since is None
            or policy is None
            or tokens.forward.target_weight is None
            or progress_of(tokens) < since
        ):
            return tokens.get(EARLY_EXIT)
        if prediction is None or prediction.targets is None:
            return None
        return EarlyExit(policy, self.pooled(prediction.targets), keeps_logits=False)

    @torch.no_grad()
    def leave(
        self, layer: int, x: Tensor, tokens: Tokens, prediction: Prediction, leaving: EarlyExit
    ) -> None:
        """Let tokens leave after block `layer`, whose output is x [B, M + T, D]."""
        if str(layer) in self.at:
            logits = self.at[str(layer)](x, None, _with_all_logits(tokens), prediction)
            leaving.observe(layer + 1, logits, tokens, causal=self.causal, shards=self)

    def logits(self, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return the logits [B, T, V] of tokens that may have left; x [B, M + T, D] is the output of the stack."""
        leaving = tokens.get(EARLY_EXIT)
        assert leaving is not None, "no token can leave"
        every = _with_all_logits(tokens)
        return leaving.finish(self.depth, lambda: prediction.head(x, None, every))

    def pooled(self, targets: Tensor) -> Tensor | None:
        """Return which tokens predict for their examples, by the targets [B, T]; None: each predicts for itself."""
        return targets != IGNORE_INDEX if self.per_example else None

    def is_trained(self, layer: int, tokens: Tokens) -> bool:
        """Whether the exit after block `layer` has a loss at this step of the run."""
        progress, two_stage = progress_of(tokens), self.config.two_stage
        if self.config.stop == "by_depth" and tokens.forward.progress is not None:
            return progress < (layer + 1) / (2 * self.depth)
        return two_stage is None or progress >= two_stage

    def attach_second(self, x: Tensor, tokens: Tokens, prediction: Prediction) -> Tensor:
        """Return the output x [B, T, D] of the stack with the loss of the second target attached; without one x."""
        targets = prediction.targets
        if targets is None or tokens.forward.target_weight is None:
            return x
        x = self._attach_diversity(None, x, tokens, prediction)
        if self.second is None:
            return x
        loss = self.second(x, self.second_targets(tokens, targets), tokens, prediction)
        self._record(self.second, loss, tokens)
        return attach(x, loss, self.config.second_target * tokens.forward.target_weight)

    def second_targets(self, tokens: Tokens, targets: Tensor) -> Tensor:
        """Return the targets [B, T] after the next ones. A seam: another rank may have them."""
        following = F.pad(targets[:, 1:], (0, 1), value=IGNORE_INDEX)
        # The first token of a document is no target, and behind it is nothing to predict from the document before.
        return following.masked_fill(targets == IGNORE_INDEX, IGNORE_INDEX)

    def _attach_diversity(
        self, part: Any, x: Tensor, tokens: Tokens, prediction: Prediction
    ) -> Tensor:
        """Return x [B, T, D], which an exit reads, with its diversity as a loss; `part` None: the model's head."""
        alpha = self.config.diversity
        targets = prediction.targets
        earlier = prediction.log_probabilities
        if not alpha or targets is None or tokens.forward.target_weight is None:
            return x
        every = _with_all_logits(tokens)
        logits = (
            prediction.head(x, None, every) if part is None else part(x, None, every, prediction)
        )
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(
            -1
        )  # [B, T, V]
        is_target = targets != IGNORE_INDEX
        entropies = [-((other.exp() * log_p).sum(-1) * is_target).sum() for other in earlier]
        earlier.append(log_p)
        if not entropies:
            return x
        return attach(x, -torch.stack(entropies).mean(), alpha * tokens.forward.target_weight)

    def weigh_last(self, loss: Tensor, tokens: Tokens) -> Tensor:
        """Return the loss of the model's own head with its weight in the gradient; the value stays.

        A seam: a pipeline stage without that head has no loss of it.
        """
        weight, two_stage = self.last_weight, self.config.two_stage
        if two_stage is not None:
            weight = 1.0 if progress_of(tokens) < two_stage else 0.0
        if tokens.forward.target_weight is None or weight == 1:
            return loss
        return loss.detach() + weight * (loss - loss.detach())

    def _record(self, part: Any, loss: Tensor, tokens: Tokens) -> None:
        """Record the mean loss of an exit over all targets of the step, as a mean over its micro-batches."""
        forward = tokens.forward
        if (
            forward.stats is None
            or forward.aux_loss_weight is None
            or forward.target_weight is None
        ):
            return
        total = self.sum_over_sequence(loss.detach())
        forward.stats.add(
            f"{part.path}/loss", total * (forward.target_weight / forward.aux_loss_weight)
        )

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        """Sum over the tokens of all sequences what a shard of them has. A seam: a sequence may be sharded."""
        return sums

    def full_sequence(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return x of all tokens [B, T, 1], and the places of those of x [T]. A seam: a sequence may be sharded."""
        return x, torch.arange(x.shape[1], device=x.device)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return values [B, T] of all tokens for those between the blocks. A seam: they may be sharded over tp."""
        return values

    def replicated_input(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return x [B, T, 1] of all tokens, for those between the blocks. A seam: they may be sharded over tp."""
        return x


def progress_of(tokens: Tokens) -> float:
    """Return the fraction of the run's steps that are done; 1 where there is no run."""
    return 1.0 if tokens.forward.progress is None else tokens.forward.progress


def _with_all_logits(tokens: Tokens) -> Tokens:
    return tokens.with_signals({ONLY_LAST_LOGITS: False})
