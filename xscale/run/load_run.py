"""Load a run on one process, for generation, evaluation or a new run made from it; needs nothing but the run folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from xscale.checkpoint.files import MANIFEST as MANIFEST_FILE
from xscale.checkpoint.load import (
    WEIGHTS,
    CheckpointReader,
    averages_of,
    load,
    read_some,
    read_state,
    unpadded_vocabulary_of,
)
from xscale.checkpoint.search import find_to_read
from xscale.core.config import decode
from xscale.core.errors import ConfigError, Problem
from xscale.core.files.run_near import run_near
from xscale.core.plugins import import_plugins, plugin_names
from xscale.data.corpus.stored_tokenizer import open_run_tokenizer
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh import axes
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import Mesh, init_mesh
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.shard.sharded import ShardedParameter, sharded_parameters
from xscale.run.parts import device_of
from xscale.run.run_folder import CHECKPOINTS, read_config
from xscale.settings.scored_text import require_model_for, with_sequence_length
from xscale.settings.settings import Settings, build_on_meta

AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True)
class LoadedRun:
    """A run on this process: its newest good checkpoint, of any layout, and its tokenizer."""

    folder: Path
    settings: Settings
    """Those of the run, on one process and without its layout."""
    step: int
    tokenizer: Tokenizer
    unpadded_vocabulary: int
    """Rows of its vocabulary that have a probability."""
    mesh: Mesh
    model: nn.Module
    parameters: list[ShardedParameter]


def load_run(
    folder: Path,
    *,
    plugins: bool = False,
    checkpoint: Path | None = None,
    ema: bool = False,
    sequence_length: int | None = None,
    option: str = "",
) -> LoadedRun:
    """Load the newest good checkpoint of the run in `folder`, or the one that `folder` is.

    Reads no corpus and trains no tokenizer. `plugins`: import the modules that the run's config names. `checkpoint`:
    one of the run's, instead of the newest. `ema`: with the moving average of the weights. `sequence_length`: of the
    texts that the model will read, which may
    be longer than the run's; None: the run's. ConfigError when there is no run, no checkpoint or no average, and at
    `option` for a model that cannot read such texts.
    """
    if checkpoint is None and (folder / MANIFEST_FILE).exists():
        checkpoint = folder
    folder = run_of(folder)
    settings = single_process(read_settings(folder, plugins=plugins))
    path = find_to_read(folder / CHECKPOINTS).path if checkpoint is None else checkpoint
    if path is None:
        raise ConfigError(str(folder), "the run has no checkpoint yet", "Wait for the first one.")
    state = read_state(path)
    tokenizer = open_run_tokenizer(folder, settings.data, state.get("tokenizer_fingerprint"))
    rank_info = read_rank_info()
    degrees = axes.resolve(settings.parallel.mesh, rank_info.world)
    mesh = init_mesh(
        rank_info,
        degrees,
        device_of(settings, rank_info),
        settings.parallel.longest_timeout_seconds,
    )
    length = settings.data.sequence_length if sequence_length is None else sequence_length
    require_model_for(settings, length, tokenizer.vocabulary, option)
    unpadded = unpadded_vocabulary_of(state, tokenizer.vocabulary)
    sizes = (tokenizer.vocabulary, unpadded)
    model = build_on_mesh(with_sequence_length(settings, length), sizes, mesh, draw_weights=False)
    parameters = sharded_parameters(model)
    weights = {f"model.{parameter.name}": parameter.parameter.detach() for parameter in parameters}
    loaded = load(path, weights, only="model.", verify=settings.checkpoint.verify)
    if ema:
        load_ema(path, parameters)
    return LoadedRun(folder, settings, loaded.step, tokenizer, unpadded, mesh, model, parameters)


def run_of(folder: Path) -> Path:
    """Return the run folder of a checkpoint; a run folder is returned unchanged."""
    return folder.absolute().parent.parent if (folder / MANIFEST_FILE).exists() else folder


def load_ema(path: Path, parameters: Sequence[ShardedParameter]) -> None:
    """Read the averages in the checkpoint at `path`, which is verified, into `parameters`. Collective.

    Parameters that were not trained have no average and keep their values. ConfigError where there is none at all.
    """
    stored = averages_of(path, CheckpointReader(path, verify=False).entries)
    averages = {
        stored[f"{WEIGHTS}{parameter.name}"]: parameter.parameter.detach()
        for parameter in parameters
        if f"{WEIGHTS}{parameter.name}" in stored
    }
    read_some(path, averages)


def build_on_mesh(
    settings: Settings, vocabulary: tuple[int, int], mesh: Mesh, *, draw_weights: bool
) -> nn.Module:
    """Build the model of `settings` on a mesh. ConfigError where its layout is not possible.

    `vocabulary`: its rows, and how many of them are tokens. `draw_weights`: give it the initial weights of `run.seed`;
    otherwise they are NaN until they are loaded.
    """
    model = build_on_meta(settings, *vocabulary)
    plan = ParallelPlan(settings.parallel, settings.precision, settings.data.sequence_length)
    if problems := plan.check(model, mesh.rank_info.world):
        raise ConfigError(problems)
    return plan.apply(model, mesh, settings.run.seed, draw_weights=draw_weights)


def read_settings(folder: Path, *, plugins: bool = False) -> Settings:
    """Read the config of the run in `folder`; with `plugins`, import the modules that it names first."""
    config = read_config(run_of(folder))
    if config is None:
        what = "the folder contains no run (no config.yaml, no checkpoint)"
        raise ConfigError(str(folder), what, run_near(folder) or "Give the run.dir of a run.")
    with plugins_of(config, folder, imported=plugins):
        return decode(Settings, config)


@contextmanager
def plugins_of(config: dict[str, Any], where: Path, *, imported: bool) -> Iterator[None]:
    """Import the plugins that a run's config names, if `imported`; otherwise say so of a part that is unknown."""
    named = plugin_names(config)
    if imported and (problems := import_plugins(named)):
        raise ConfigError(problems)
    try:
        yield
    except ConfigError as error:
        if imported or not named or not any(problem.unknown_kind for problem in error.problems):
            raise
        what = f"the run's config names plugins, which are not imported: {', '.join(named)}"
        fix = "Give --plugins to import them; they run as part of this command."
        raise ConfigError([Problem(str(where), what, fix), *error.problems]) from None


def single_process(settings: AnySettings) -> AnySettings:
    """`settings` without the layout of the run, and on a device of this machine."""
    device = (
        "auto"
        if settings.run.device == "cuda" and not torch.cuda.is_available()
        else settings.run.device
    )
    run = settings.run.model_copy(update={"device": device})
    return settings.model_copy(update={"parallel": type(settings.parallel)(), "run": run})
