"""Config of exits, and the checks of what in it goes together."""

from typing import Any, Literal

from pydantic import Field

from xscale.core.config import Config, NonNegativeFloat, NonNegativeInt
from xscale.core.errors import Problem
from xscale.core.requirements import change, kinds, take
from xscale.nn.depth.depth_pass import StackUse
from xscale.nn.depth.early_exit import ExitPolicyConfig
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import hands_on_scores, without_scores
from xscale.nn.norm.norm import NORMS

POLICIES = (
    {"criterion": "entropy", "threshold": 1},
    {"criterion": "patience", "threshold": 1},
)
"""Policies that are named where there is none."""


class ExitsConfig(Config):
    blocks: tuple[NonNegativeInt, ...] | None = Field(default=None, min_length=1)
    """Numbers of the blocks, from 0, after which there is an exit; null: all but the last, which the model's own head
    follows."""
    head: Literal["own", "shared"] = "own"
    """own: each exit has a head of its own; shared: all exits predict by the model's head."""
    norm: bool = True
    """Whether each exit has a norm of its own, of the blocks' kind, before its head."""
    weights: Literal["equal", "linear"] = "equal"
    """Weights of the losses. equal: 1 for each exit and for the model's head; linear: l / (sum of the l) for the loss
    after block l, counted from 1 (Zhou et al. 2020)."""
    stop: Literal["never", "by_depth"] = "never"
    """by_depth: the loss after block l of L, from 1, ends after the fraction l / (2 L) of the run's steps (Al-Rfou et
    al. 2019)."""
    second_target: NonNegativeFloat = 0.0
    """Weight of the loss of one more head, which predicts the token after the next from the output of the stack, as
    Al-Rfou et al. 2019 have it; 0: there is none."""
    two_stage: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the run's steps in which the exits are not trained; in the rest they alone are (Xin et al. 2020), and
    `optimizer.groups` freeze all other parameters. null: all are trained together."""
    self_sampling: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the run's steps after which tokens leave by the policy in training too, so that the losses of later
    exits and of the model's head are those of copied hidden states (Li et al. 2021); null: never."""
    diversity: NonNegativeFloat = 0.0
    """Weight alpha of the diversity of the predictions (Sun et al. 2021): alpha times the cross-entropy of each exit's
    and the last block's distribution against those of the exits before it, in their mean, is subtracted from the loss.
    It needs the logits of all targets at once; 0: none."""
    policy: ExitPolicyConfig | None = None
    """When a token leaves at an exit in generation and in `xscale eval --exits`; null: never. Training and other
    evaluations compute all blocks."""

    def check_outputs(self, path: str, *, scores: bool, per_example: bool) -> list[Problem]:
        """List what exits that predict scores, or one class for each example, cannot have."""
        problems, policy = [], self.policy
        if scores and self.diversity:
            what = "scores have no distribution, whose cross-entropy tells two exits apart"
            problems.append(Problem(f"{path}.diversity", what, choices=take(0.0)))
        if scores and policy is not None and policy.criterion != "patience":
            what = f"'{policy.criterion}' reads a distribution or votes, and the objective's labels are scores"
            keys = {
                "criterion": "patience",
                "threshold": 1,
                "tolerance": 0.1,
                "window": None,
                "power": None,
            }
            patience = change(*[(f"{path}.policy.{key}", value) for key, value in keys.items()])
            problems.append(Problem(f"{path}.policy", what, choices=patience))
        elif scores and policy is not None and policy.tolerance is None:
            what = "patience counts the scores that agree, and nothing says how close these are"
            fix = "Other distances work too."
            problems.append(Problem(f"{path}.policy.tolerance", what, fix, choices=take(0.1)))
        if not scores and policy is not None and policy.tolerance is not None:
            what = "it is a distance of scores, and the exits predict tokens or classes"
            problems.append(Problem(f"{path}.policy.tolerance", what, choices=take(None)))
        if per_example and policy is not None and policy.window:
            what = "an example leaves as a whole, by what one of its tokens predicts, and has no neighbours"
            problems.append(Problem(f"{path}.policy.window", what, choices=take(0)))
        return problems

    def after(self, depth: int) -> tuple[int, ...]:
        """Return the blocks with an exit, from 0, in a stack of `depth` blocks."""
        return tuple(range(depth - 1)) if self.blocks is None else self.blocks


def check_exits(config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
    """List what the exits of a stack of this `StackConfig` cannot be."""
    exits, where = config.exits, f"{path}.exits"
    if exits is None:
        return []
    refused = check_stack(config, path, use)
    if refused is not None:
        return [refused]
    if dims.depth == 1:
        choices = take(None) + take(2, key=f"{path}.depth")
        return [Problem(where, "the model's head follows the only block", choices=choices)]
    problems = [
        *check_blocks(exits, dims.depth, where),
        *check_losses(exits, dims.causal, where),
    ]
    norm = NORMS.of(config.block.norm)
    if exits.norm and norm.traits.batch_statistics:
        what = f"'{norm.name}' collects statistics in every step, and an exit does not see the tokens of every step"
        norms = kinds(NORMS.able(batch_statistics=False), f"{path}.block.norm")
        problems.append(Problem(f"{where}.norm", what, choices=take(False) + norms))
    policy = exits.policy
    return problems + (
        [] if policy is None else policy.check(len(exits.after(dims.depth)), f"{where}.policy")
    )


def check_stack(stack: Any, path: str, use: StackUse) -> Problem | None:
    """Return why a stack of this `StackConfig`, at `path`, can have no exits; None: it can."""
    where, without = f"{path}.exits", take(None)
    if not use.predicts:
        what = "the model's head does not read the output of this stack alone, and an exit predicts as that head does"
        return Problem(where, what, choices=without)
    if stack.exits.policy is not None and hands_on_scores(stack):
        what = "a token that has left has no attention scores to hand on to the next block"
        choices = without + take(None, key=f"{where}.policy") + without_scores(stack)
        return Problem(where, what, choices=choices)
    if stack.halting is not None:
        what = "the output is a mean over the blocks in which a token was computed, and an exit would read one block's"
        return Problem(where, what, choices=without + take(None, key=f"{path}.halting"))
    return None


def check_blocks(config: ExitsConfig, depth: int, path: str) -> list[Problem]:
    """List what the blocks with an exit cannot be in a stack of `depth` blocks."""
    after = config.after(depth)
    where, problems = f"{path}.blocks", []
    beyond = [layer for layer in after if layer >= depth - 1]
    if beyond:
        what = (
            f"a stack of {depth} has no inner block {beyond[0]}; its inner ones are 0 to {depth - 2}, "
            "and the model's head follows its last block"
        )
        inner = sorted({layer for layer in after if layer < depth - 1}) or [depth - 2]
        problems.append(Problem(where, what, choices=take(inner, None)))
    if list(after) != sorted(set(after)):
        ascending = take(sorted(set(after)), None)
        problems.append(Problem(where, "the blocks must ascend", choices=ascending))
    return problems


def check_losses(config: ExitsConfig, causal: bool, path: str) -> list[Problem]:
    """List which losses and stages of training do not go together; `causal`: the model has a next token."""
    problems, policy = [], config.policy
    together = take(None, key=f"{path}.two_stage")
    if config.two_stage is not None and config.head == "shared":
        what = "the second stage trains the exits alone, and their head is the model's, which is frozen"
        problems.append(Problem(f"{path}.head", what, choices=take("own") + together))
    if config.two_stage is not None and config.stop != "never":
        what = "in two stages the exits are trained last, and by_depth ends their losses before"
        problems.append(Problem(f"{path}.stop", what, choices=take("never") + together))
    if config.second_target and (config.two_stage is not None or not causal):
        what = (
            "two stages train nothing behind the exits"
            if causal
            else "an encoder has no next token"
        )
        choices = take(0.0) + (together if causal else ())
        problems.append(Problem(f"{path}.second_target", what, choices=choices))
    if config.two_stage is not None and config.weights == "linear":
        what = "in two stages the model's head and the exits are never trained together"
        problems.append(Problem(f"{path}.weights", what, choices=take("equal") + together))
    if config.diversity and (config.two_stage is not None or config.stop != "never"):
        what = "diversity is that of predictions which are trained together, and these end or begin apart"
        always = change((f"{path}.two_stage", None), (f"{path}.stop", "never"))
        problems.append(Problem(f"{path}.diversity", what, choices=take(0.0) + always))
    if config.self_sampling is not None and (policy is None or config.two_stage is not None):
        what = (
            "tokens leave by a policy, and there is none"
            if policy is None
            else "all blocks are frozen then"
        )
        choices = take(None) + (
            take(*POLICIES, key=f"{path}.policy") if policy is None else together
        )
        problems.append(Problem(f"{path}.self_sampling", what, choices=choices))
    return problems
