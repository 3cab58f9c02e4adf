"""Check what an optimizer cannot be in a run: with DeepSpeed, with a schedule, or with muP."""

from importlib.util import find_spec

from xscale.core.errors import Problem
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.train.settings import Settings


def check_optimizer(settings: Settings) -> list[Problem]:
    """List what the optimizer lacks on this machine, and what DeepSpeed cannot do with it."""
    entry, problems = OPTIMIZERS.of(settings.optimizer), list[Problem]()
    for package, command in entry.part.requires.items():
        if find_spec(package) is None:
            what = f"'{entry.name}' needs {package}, which is not installed"
            problems.append(Problem("optimizer.kind", what, f"Run: {command}, or take adamw."))
    if settings.parallel.zero.engine != "deepspeed":
        return problems
    if not entry.traits.elementwise:
        what = f"'{entry.name}' updates whole matrices, and DeepSpeed shards them flattened"
        able = ", ".join(name for name in OPTIMIZERS.able(elementwise=True) if _can_be_flattened(name))
        problems.append(Problem("optimizer.kind", what, f"Take one of {able}, or parallel.zero.engine=torch."))
    if entry.part.requires and entry.traits.elementwise:
        what = f"'{entry.name}' has blocks of rows, and DeepSpeed flattens parameters into one tensor"
        problems.append(Problem("optimizer.kind", what, "Take adamw, or parallel.zero.engine=torch."))
    if settings.optimizer.groups:
        what = (
            "DeepSpeed flattens parameters of many names into one tensor, which has one learning rate and is clipped "
            "as one"
        )
        fix = "Leave optimizer.groups empty, or take parallel.zero.engine=torch."
        problems.append(Problem("optimizer.groups", what, fix))
    if settings.train.ema_decay is not None:
        what = "DeepSpeed keeps the weights in tensors of its own, of which there is no moving average"
        problems.append(Problem("train.ema_decay", what, "Leave it null, or take parallel.zero.engine=torch."))
    return problems


def _can_be_flattened(name: str) -> bool:
    """Whether an elementwise optimizer works on a flat tensor of many parameters."""
    part = OPTIMIZERS.get(name).part
    return part.averaged_state is None and not part.requires


def check_averaging(settings: Settings) -> list[Problem]:
    """List what does not go with an optimizer that evaluates an average of its weights in place of a schedule."""
    if OPTIMIZERS.of(settings.optimizer).part.averaged_state is None:
        return []
    kind, problems = settings.optimizer.kind, list[Problem]()
    if settings.schedule.kind != "constant":
        what = f"'{settings.schedule.kind}' lowers the learning rate, and '{kind}' averages the weights in its place"
        problems.append(Problem("schedule.kind", what, "Take constant, which has a warm-up."))
    if settings.train.ema_decay is not None:
        what = f"'{kind}' evaluates an average of the weights already"
        problems.append(Problem("train.ema_decay", what, "Leave it null, or take another optimizer."))
    for index, group in enumerate(settings.optimizer.groups):
        if group.since > 0 or group.until < 1:
            what = f"'{kind}' averages the weights of all steps, and these are frozen in some"
            fix = "Take since=0 and until=1, train.freeze for the whole run, or another optimizer."
            problems.append(Problem(f"optimizer.groups.{index}", what, fix))
    if settings.parallel.zero.engine == "deepspeed":
        what = f"DeepSpeed keeps the weights in tensors of its own, and '{kind}' evaluates others than it trains"
        fix = "Take another optimizer, or parallel.zero.engine=torch."
        problems.append(Problem("optimizer.kind", what, fix))
    return problems


def check_mup_optimizer(settings: Settings) -> list[Problem]:
    """List why the optimizer has no learning rates by the width."""
    entry, problems = OPTIMIZERS.of(settings.optimizer), []
    if entry.part.mup_exponent(settings.optimizer, linear_map=True) is None:
        able = [
            other.name
            for other in OPTIMIZERS
            if other.part.mup_exponent(other.part.Config(), linear_map=True) is not None
        ]
        what = f"'{entry.name}' has no rule for learning rates by the width, which model.mup needs"
        problems.append(Problem("optimizer.kind", what, f"Take one of {', '.join(able)}, or leave out model.mup."))
    if settings.parallel.zero.engine == "deepspeed":
        what = "DeepSpeed flattens parameters into one tensor, which has one learning rate"
        problems.append(Problem("model.mup", what, "Leave it null, or take parallel.zero.engine=torch."))
    return problems
