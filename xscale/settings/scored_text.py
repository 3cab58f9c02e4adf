"""Models that score text: those that predict each token from the ones before it alone."""

from dataclasses import replace
from importlib.util import find_spec

from torch import nn

from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import take
from xscale.nn.ffn.moe.moe import Moe, noncausal_routing
from xscale.nn.model.model import MODELS
from xscale.nn.position.position import POSITIONS
from xscale.objective.objective import OBJECTIVES
from xscale.settings.settings import Settings, build_on_meta


def check_scores_text(settings: Settings, model: nn.Module, path: str) -> list[Problem]:
    """List why the probability of a text by a run's model is not that of its tokens, each given those before it.

    `path`: the option or key that needs it.
    """
    entry, objective = MODELS.of(settings.model), OBJECTIVES.of(settings.objective)
    if not entry.traits.causal or entry.traits.source:
        reads = (
            "reads a source beside the text"
            if entry.traits.source
            else "is not causal: a token sees later ones"
        )
        return [Problem(path, f"the model '{entry.name}' {reads}", "Use the run of a decoder.")]
    if not objective.traits.causal or objective.traits.samples != "packed":
        what = f"the objective '{objective.name}' does not train the model to predict the next token of a text"
        able = [
            part.name
            for part in OBJECTIVES
            if part.traits.causal and part.traits.samples == "packed"
        ]
        fix = f"Use a run of one of: {', '.join(name for name in able if not OBJECTIVES.get(name).traits.source)}."
        return [Problem(path, what, fix)]
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, Moe)}
    leaks = [
        leak
        for name, module in mixtures.items()
        for leak in noncausal_routing(module.config, f"model.{name}")
    ]
    return [
        Problem(path, f"{leak.path}: {leak.what}", "Use a run whose routing is causal.")
        for leak in leaks[:1]
    ]


def check_tasks(settings: Settings, model: nn.Module) -> list[Problem]:
    """List why a run cannot evaluate the tasks that `train.tasks` names."""
    if not settings.train.tasks.names:
        return []
    key = "train.tasks.names"
    scored = [replace(problem, fix="") for problem in check_scores_text(settings, model, key)]
    return [replace(problem, choices=take([])) for problem in check_lm_eval(key) + scored]


def check_lm_eval(path: str) -> list[Problem]:
    """List that lm_eval, which `path` asks for, is not installed."""
    if find_spec("lm_eval") is not None:
        return []
    fix = "Install it: pip install 'lm_eval>=0.4.13,<0.5'."
    return [Problem(path, "tasks are evaluated by lm_eval, which is not installed", fix)]


def require_model_for(settings: Settings, length: int, vocabulary: int, path: str) -> None:
    """ConfigError at `path` unless the run's model reads texts of `length` tokens, longer ones than in training."""
    trained = settings.data.sequence_length
    if length <= trained:
        return
    fix = f"Take at most {trained}, the run's data.sequence_length."
    position = POSITIONS.of(settings.model.position)
    if not position.traits.extrapolates:
        what = f"{length} tokens are more than the position '{position.name}' has learned"
        raise ConfigError(path, what, fix)
    shapes = [
        {
            name: parameter.shape
            for name, parameter in build_on_meta(version, vocabulary).named_parameters()
        }
        for version in (settings, with_sequence_length(settings, length))
    ]
    if changed := [name for name, shape in shapes[0].items() if shapes[1].get(name) != shape]:
        what = f"{length} tokens are more than the parameter {changed[0]} is made for"
        raise ConfigError(path, what, fix)


def with_sequence_length(settings: Settings, length: int) -> Settings:
    """Return the settings of a run on texts of `length` tokens."""
    return settings.model_copy(
        update={"data": settings.data.model_copy(update={"sequence_length": length})}
    )
