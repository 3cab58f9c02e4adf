"""The decision about a step whose gradients are reduced: any policy may refuse the update, and the first counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from xscale.step.stepper import StepGradients

Action = Literal["accept", "skip", "rollback", "stop", "lower_loss_scale"]


@dataclass(frozen=True)
class StepDecision:
    """Whether a step updates the parameters; if not, what happens instead and why."""

    action: Action
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return self.action == "accept"


class StepPolicy(Protocol):
    """A reason for which steps are not accepted.

    It reads the run's state and sums over all ranks, which are bitwise the same on each: so all ranks decide the same,
    and so does a resumed run.
    """

    def decide(self, gradients: StepGradients) -> StepDecision | None:
        """Return what happens instead of the update; None: this policy has nothing against it."""
        ...

    def record(
        self, gradients: StepGradients, decision: StepDecision, means: dict[str, Tensor]
    ) -> None:
        """Note in the run's state, after the step, what was decided, and report a step of its own that is skipped.

        `means`: the statistics of the step over all ranks. FaultError where the run must end.
        """
        ...


def decide_by(policies: Sequence[StepPolicy], gradients: StepGradients) -> StepDecision:
    """Return the decision of the first policy that has something against the update."""
    for policy in policies:
        decision = policy.decide(gradients)
        if decision is not None:
            return decision
    return StepDecision("accept")
