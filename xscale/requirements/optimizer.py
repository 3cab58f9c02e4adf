"""Requirements of an optimizer: on this machine, on the engine that shards its states, on the schedule, for muP."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from torch import nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.adapt.mup import check_mup
from xscale.nn.depth.exits import Exits
from xscale.nn.model.model import Model
from xscale.optim.groups import ParameterGroup, check_groups, group_of
from xscale.optim.optimizer.optimizer import OPTIMIZERS, Optimizer
from xscale.optim.schedule import Schedule
from xscale.parallel.config import ParallelConfig
from xscale.settings.settings import TrainConfig

ENGINE = take("torch", key="parallel.zero.engine")
"""The engine that keeps each parameter as a tensor of its own."""


def optimizer_is_installed(optimizer: Optimizer.Config) -> Iterator[Problem]:
    """The packages that the optimizer needs are there."""
    entry = OPTIMIZERS.of(optimizer)
    for package, command in entry.part.requires.items():
        if find_spec(package) is None:
            what = f"'{entry.name}' needs {package}, which is not installed"
            yield Problem("optimizer.kind", what, f"Or run: {command}.", choices=take("adamw"))


def engine_can_shard_the_optimizer(
    optimizer: Optimizer.Config, parallel: ParallelConfig
) -> Iterator[Problem]:
    """A matrix, or blocks of its rows, that the optimizer updates as one stays one tensor."""
    entry = OPTIMIZERS.of(optimizer)
    if parallel.zero.engine != "deepspeed":
        return
    if not entry.traits.elementwise:
        what = f"'{entry.name}' updates whole matrices, and DeepSpeed shards them flattened"
        yield Problem(
            "optimizer.kind", what, choices=ENGINE + take(*OPTIMIZERS.able(elementwise=True))
        )
    elif entry.part.requires:
        what = (
            f"'{entry.name}' has blocks of rows, and DeepSpeed flattens parameters into one tensor"
        )
        yield Problem("optimizer.kind", what, choices=ENGINE + take("adamw"))


def engine_knows_the_groups(
    optimizer: Optimizer.Config, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Parameters with settings of their own stay tensors of their own."""
    if parallel.zero.engine == "deepspeed" and optimizer.groups:
        what = (
            "DeepSpeed flattens parameters of many names into one tensor, which has one learning rate and is clipped "
            "as one"
        )
        yield Problem("optimizer.groups", what, choices=take([]) + ENGINE)


def weights_have_one_average(
    optimizer: Optimizer.Config, parallel: ParallelConfig, train: TrainConfig
) -> Iterator[Problem]:
    """The moving average of the weights is that of the model's own parameters, and the only one."""
    average, kind = OPTIMIZERS.of(optimizer).part.averaged_state, optimizer.kind
    if train.ema_decay is not None and parallel.zero.engine == "deepspeed":
        what = (
            "DeepSpeed keeps the weights in tensors of its own, of which there is no moving average"
        )
        yield Problem("train.ema_decay", what, choices=take(None) + ENGINE)
    if train.ema_decay is not None and average is not None:
        what = f"'{kind}' evaluates an average of the weights already"
        yield Problem("train.ema_decay", what, choices=take(None) + _without_average())
    if average is not None and parallel.zero.engine == "deepspeed":
        what = f"DeepSpeed keeps the weights in tensors of its own, and '{kind}' evaluates others than it trains"
        yield Problem("optimizer.kind", what, choices=ENGINE + take("adamw"))


def averaged_weights_are_of_all_steps(
    optimizer: Optimizer.Config, schedule: Schedule.Config
) -> Iterator[Problem]:
    """An optimizer that averages the weights in place of a schedule has a constant rate, and no frozen steps."""
    if OPTIMIZERS.of(optimizer).part.averaged_state is None:
        return
    kind = optimizer.kind
    if schedule.kind != "constant":
        what = f"'{schedule.kind}' lowers the learning rate, and '{kind}' averages the weights in its place"
        yield Problem("schedule.kind", what, choices=take("constant") + _without_average())
    for index, group in enumerate(optimizer.groups):
        if group.since > 0 or group.until < 1:
            what = f"'{kind}' averages the weights of all steps, and these are frozen in some"
            path = f"optimizer.groups[{index}]"
            every_step = Choice(((f"{path}.since", 0.0), (f"{path}.until", 1.0)))
            fix = "Or freeze them in the whole run by train.freeze."
            yield Problem(
                f"optimizer.groups.{index}", what, fix, choices=(every_step, *_without_average())
            )


def _without_average() -> tuple[Choice, ...]:
    return kinds(["adamw"], "optimizer")


def groups_have_parameters(built_model: nn.Module, optimizer: Optimizer.Config) -> list[Problem]:
    """Each group of the optimizer has a parameter, and the stages of training of exits have theirs."""
    names = [name for name, parameter in built_model.named_parameters() if parameter.requires_grad]
    problems = check_groups(optimizer.groups, names, "optimizer.groups")
    return problems + _check_two_stage(built_model, optimizer.groups, names)


def _check_two_stage(
    model: nn.Module, groups: Sequence[ParameterGroup], names: Sequence[str]
) -> list[Problem]:
    """Check that the parameters which a stage of the training of exits does not train are frozen in it."""
    stages = [module.config.two_stage for module in model.modules() if isinstance(module, Exits)]
    if not stages or stages[0] is None:
        return []
    change = stages[0]
    for name in names:
        index = group_of(name, groups)
        frozen = (0.0, 1.0) if index is None else (groups[index].since, groups[index].until)
        if frozen != ((change, 1.0) if ".exits." in name else (0.0, change)):
            what = f"with exits.two_stage={change:g} each stage freezes the exits or all else, and {name} is not frozen"
            staged = [{"match": "*.exits.*", "since": change}, {"match": "*", "until": change}]
            return [Problem("optimizer.groups", what, choices=take(staged))]
    return []


def widths_have_rules(built_model: nn.Module, model: Model.Config) -> list[Problem]:
    """muP has a rule for each parameter."""
    return [] if model.mup is None else check_mup(built_model, model, "model")


def learning_rates_go_by_the_width(
    model: Model.Config, optimizer: Optimizer.Config, parallel: ParallelConfig
) -> Iterator[Problem]:
    """With muP the optimizer has a rule for learning rates by the width, and the engine one for each parameter."""
    if model.mup is None:
        return
    entry = OPTIMIZERS.of(optimizer)
    if entry.part.mup_exponent(optimizer, linear_map=True) is None:
        ruled = [
            other.name
            for other in OPTIMIZERS
            if other.part.mup_exponent(other.part.Config(), linear_map=True) is not None
        ]
        what = f"'{entry.name}' has no rule for learning rates by the width, which model.mup needs"
        yield Problem("optimizer.kind", what, choices=take(*ruled) + take(None, key="model.mup"))
    if parallel.zero.engine == "deepspeed":
        what = "DeepSpeed flattens parameters into one tensor, which has one learning rate"
        yield Problem("model.mup", what, choices=take(None) + ENGINE)


REQUIREMENTS = (
    optimizer_is_installed,
    engine_can_shard_the_optimizer,
    engine_knows_the_groups,
    weights_have_one_average,
    averaged_weights_are_of_all_steps,
    groups_have_parameters,
    widths_have_rules,
    learning_rates_go_by_the_width,
)
