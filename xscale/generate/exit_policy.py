"""The policy by which tokens leave a model at its exits."""

from torch import nn

from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.early_exit import ExitPolicyConfig
from xscale.nn.depth.exits import Exits


def stack_with_exits(model: nn.Module) -> Stack | None:
    """Return the stack of the model that has exits; None: it has none."""
    return next(
        (module for module in model.modules() if isinstance(module, Stack) and module.find(Exits)),
        None,
    )


def exit_policy_of(model: nn.Module) -> ExitPolicyConfig | None:
    """Return the policy of the model's exits; None: it has no exits, or they have none."""
    stack = stack_with_exits(model)
    exits = None if stack is None else stack.find(Exits)
    return None if exits is None else exits.config.policy
