"""The facts of a recipe besides its sections: the registered parts with their traits, the model on meta, the mesh."""

from torch import nn

from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.core.requirements import UNKNOWN, reads
from xscale.mesh import axes
from xscale.mesh.axes import Degrees
from xscale.nn.model.model import MODELS, Model, ModelTraits
from xscale.objective.objective import OBJECTIVES, Objective, ObjectiveTraits
from xscale.parallel.config import ParallelConfig
from xscale.settings.settings import Settings, build_on_meta

VOCABULARY = 64
"""The vocabulary is unknown before there is a tokenizer; nothing that is required depends on its size."""


def model_entry(model: Model.Config) -> Entry[ModelTraits]:
    """Return the registered model."""
    return MODELS.of(model)


def objective_entry(objective: Objective.Config) -> Entry[ObjectiveTraits]:
    """Return the registered objective."""
    return OBJECTIVES.of(objective)


@reads("model", "data", "objective", "distill", "lora", "train", "kernels")
def built_model(
    settings: Settings,
    model_fits_itself: tuple[Problem, ...],
    kernels_can_be_chosen: tuple[Problem, ...],
) -> nn.Module | object:
    """Return the full model on meta; unknown where its config has problems."""
    return (
        UNKNOWN
        if model_fits_itself or kernels_can_be_chosen
        else build_on_meta(settings, VOCABULARY)
    )


def degrees(parallel: ParallelConfig, world: int) -> Degrees | object:
    """Return the degrees of the mesh on these ranks, else on the fewest that it fits; unknown where it fits none."""
    fitting = axes.checkable_world(parallel.mesh, world)
    return UNKNOWN if fitting is None else axes.resolve(parallel.mesh, fitting)


FACTS = (model_entry, objective_entry, built_model, degrees)
