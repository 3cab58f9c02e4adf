"""Requirements of the layout of a run: the steps of the parallel plan, and a student and its teacher."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from xscale.core.choices import Choice
from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import reads, with_paths
from xscale.distill.distill_check import check_distillation, check_student
from xscale.distill.teacher_source import in_train_teacher, teacher_run
from xscale.mesh import axes
from xscale.nn.head.distillation import DistillConfig
from xscale.nn.model.model import Model
from xscale.nn.module import unmet_needs
from xscale.parallel.config import ParallelConfig, PrecisionConfig
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.plan_step import Step, StepSettings
from xscale.parallel.steps import STEPS
from xscale.settings.settings import Settings


@reads("data")
def step_settings(
    settings: Settings, parallel: ParallelConfig, precision: PrecisionConfig, world: int
) -> StepSettings:
    """Return the settings that every step of the parallel plan gets."""
    return ParallelPlan(parallel, precision, settings.data.sequence_length).settings(world)


FACTS = (step_settings,)


def mesh_fits_the_ranks(parallel: ParallelConfig, world: int) -> list[Problem]:
    """The degrees of the mesh make as many ranks as there are."""
    return axes.check(parallel.mesh, world)


def _of_config(step: Step) -> Callable[..., list[Problem]]:
    def check(step_settings: StepSettings) -> list[Problem]:
        return step.check(None, step_settings)

    check.__name__ = f"{step.name} can be configured so"
    return check


def _of_model(step: Step) -> Callable[..., list[Problem]]:
    def check(
        step_settings: StepSettings, built_model: nn.Module, model: Model.Config
    ) -> list[Problem]:
        return [
            with_paths(problem, model, "model")
            for problem in step.check(built_model, step_settings)
        ]

    check.__name__ = f"{step.name} can be applied to the model"
    return check


@reads("parallel")
def needs_of_modules_are_met(
    settings: Settings, built_model: nn.Module, parallel: ParallelConfig
) -> Iterator[Problem]:
    """The layout and the engine are such as every module of the model states in `Module.needs`; each reason once."""
    return unmet_needs(built_model, settings)


@reads("objective")
def distillation_can_be_configured_so(
    settings: Settings,
    distill: DistillConfig | None,
    model: Model.Config,
    parallel: ParallelConfig,
    world: int,
) -> list[Problem]:
    """The losses of a student have what they compare, and there are ranks for the teacher."""
    return check_distillation(settings, world)


def student_can_be_compared(
    built_model: nn.Module,
    distill: DistillConfig | None,
    parallel: ParallelConfig,
    model: Model.Config,
) -> list[Problem]:
    """The student has the states that are compared with the teacher's."""
    problems = [] if distill is None else check_student(built_model, distill, parallel)
    return [with_paths(problem, model, "model") for problem in problems]


def teachers_run(checked: Callable[[Settings, int], list[Problem]]) -> Callable[..., list[Problem]]:
    """Return the requirement that the run which trains the teacher first has no problems, by the check of a recipe."""

    def teacher_can_be_trained(
        settings: Settings,
        distill: DistillConfig | None,
        model: Model.Config,
        parallel: ParallelConfig,
        world: int,
    ) -> list[Problem]:
        try:
            teacher = teacher_run(settings)
        except ConfigError as error:
            return list(error.problems)
        return (
            [] if teacher is None else [_of_teacher(problem) for problem in checked(teacher, world)]
        )

    return teacher_can_be_trained


def _of_teacher(problem: Problem) -> Problem:
    """Return a problem of the teacher's run, with its choices, as one of the student's config."""
    choices = [
        Choice(
            tuple(
                (f"distill.train_teacher.{key or problem.path}", value)
                for key, value in choice.edits
            )
        )
        for choice in problem.choices
    ]
    return replace(in_train_teacher(problem), choices=tuple(choices))


CHECKING = [step for step in STEPS if step.checks]
OF_STEPS: tuple[Callable[..., Any], ...] = (
    mesh_fits_the_ranks,
    *map(_of_config, CHECKING),
    needs_of_modules_are_met,
    *map(_of_model, CHECKING),
)
OF_DISTILLATION = (distillation_can_be_configured_so, student_can_be_compared)
