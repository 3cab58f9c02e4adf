"""`xscale checkpoint import --from deepspeed-universal`: create a run from DeepSpeed's universal checkpoint."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from xscale.convert.deepspeed import UniversalCheckpoint, read_universal
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.nn.module import parameter_axes
from xscale.recipe import Recipe, read
from xscale.run.init_run import create_run, model_from_weights, require_no_run
from xscale.settings.settings import build_on_meta


def import_universal(
    source: Path,
    run: Path,
    config: Path | None,
    overrides: list[str],
    *,
    say: Callable[[str], None] = print,
) -> int:
    """Create `run`, at step 0, from the weights and optimizer states in `source`; the exit status.

    The folder does not describe its model, so `config` does. ConfigError when their parameters differ.
    """
    require_no_run(run)
    if config is None:
        raise ConfigError(
            "CONFIG", "a universal checkpoint does not describe its model", "Give the run's config."
        )
    universal = read_universal(source)
    settings = read(config, [*overrides, f"run.dir={run}"])[0]
    vocabulary = _vocabulary(settings, universal, source)
    _check(build_on_meta(settings, vocabulary), settings, universal, source)
    path = create_run(
        settings,
        model_from_weights(settings, vocabulary, universal.weights),
        run,
        universal.states,
        universal.step,
    )
    say(f"{path}: the weights and their states after {universal.step} steps, bit for bit")
    return EXIT_DONE


def _vocabulary(settings: Recipe, universal: UniversalCheckpoint, source: Path) -> int:
    for name, axes in parameter_axes(build_on_meta(settings, 64)).items():
        if (
            "vocab" in axes
            and name in universal.weights
            and len(axes) == universal.weights[name].dim()
        ):
            return universal.weights[name].shape[axes.index("vocab")]
    what = "it has no embedding with the name in this config's model"
    raise ConfigError(str(source), what, "Give the config that it was trained with.")


def _check(
    model: nn.Module, settings: Recipe, universal: UniversalCheckpoint, source: Path
) -> None:
    fix = "Give the config that it was trained with; parameters are matched by name."
    parameters = dict(model.named_parameters())
    if lacking := [name for name in parameters if name not in universal.weights]:
        raise ConfigError(str(source), f"it lacks {lacking[0]} ({len(lacking)} in all)", fix)
    # A tied weight has two names in DeepSpeed.
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := [name for name in universal.weights if name not in known]:
        raise ConfigError(
            str(source), f"it has {unknown[0]}, which the model lacks ({len(unknown)} in all)", fix
        )
    for name, parameter in parameters.items():
        if parameter.shape != universal.weights[name].shape:
            shape, shape_there = list(parameter.shape), list(universal.weights[name].shape)
            raise ConfigError(
                str(source), f"{name} has shape {shape_there}, the model has {shape}", fix
            )
    kind = settings.optimizer.kind
    if any(universal.states.values()) and kind != "adamw":
        what = f"its states are AdamW's, but the config's optimizer is '{kind}'"
        raise ConfigError(str(source), what, "Set optimizer.kind=adamw.")
