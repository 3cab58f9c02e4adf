"""Load a run on one process, for generation, evaluation or a new run made from it; needs nothing but the run folder."""

import importlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.foreign import foreign_errors
from xscale.core.yaml_reader import parse
from xscale.data.config import DataConfig
from xscale.data.indexed import suffixed
from xscale.data.loader import Loader
from xscale.data.prepared import MANIFEST
from xscale.data.stored_tokenizer import open_run_tokenizer, with_tokenizer
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh import axes
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import Mesh, init_mesh, leaving_process_group
from xscale.nn.depth.early_exit import ExitPolicyConfig
from xscale.nn.depth.exits import Exits
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.sharded import ShardedParameter, sharded_parameters
from xscale.train.batches import MicroBatches
from xscale.train.budget_curve import budget_curve, gate_budgets
from xscale.train.evaluate import Evaluation, evaluate
from xscale.train.exit_curve import exit_curve, stack_with_exits
from xscale.train.init_weights import data_with_adopted_tokenizer
from xscale.train.run_folder import CHECKPOINTS, read_config
from xscale.train.scored_text import require_model_for, with_sequence_length
from xscale.train.settings import Settings, build_on_meta
from xscale.train.setup import device_of, make_micro_batches, prepare_and_open_data, special_tokens_of

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
    mesh = init_mesh(rank_info, degrees, device_of(settings, rank_info), settings.parallel.longest_timeout_seconds)
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


def build_on_mesh(settings: Settings, vocabulary: tuple[int, int], mesh: Mesh, *, draw_weights: bool) -> nn.Module:
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
        raise ConfigError(str(folder), what, "Give the run.dir of a run.")
    with plugins_of(config, folder, imported=plugins):
        return decode(Settings, config)


@contextmanager
def plugins_of(config: dict[str, Any], where: Path, *, imported: bool) -> Iterator[None]:
    """Import the plugins that a run's config names, if `imported`; otherwise say so of a part that is unknown."""
    plugins = config.get("plugins")
    named = [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list | tuple) else []
    if imported:
        import_plugins(named)
    try:
        yield
    except ConfigError as error:
        if imported or not named or not any(problem.unknown_kind for problem in error.problems):
            raise
        what = f"the run's config names plugins, which are not imported: {', '.join(named)}"
        fix = "Give --plugins to import them; they run as part of this command."
        raise ConfigError([Problem(str(where), what, fix), *error.problems]) from None


def import_plugins(names: list[str]) -> None:
    """Import modules that may register parts. ConfigError for one that cannot be imported."""
    for name in names:
        with foreign_errors("plugins", f"'{name}' cannot be imported", "Is it installed?"):
            importlib.import_module(name)


def single_process(settings: AnySettings) -> AnySettings:
    """`settings` without the layout of the run, and on a device of this machine."""
    device = "auto" if settings.run.device == "cuda" and not torch.cuda.is_available() else settings.run.device
    run = settings.run.model_copy(update={"device": device})
    return settings.model_copy(update={"parallel": type(settings.parallel)(), "run": run})


@dataclass(frozen=True)
class EvaluationData:
    """The text that a loaded run is evaluated on."""

    objective: Objective
    batches: MicroBatches
    token_bytes: Tensor
    """[V] bytes of text each token stands for."""

    @property
    def sequences(self) -> int:
        """Sequences of the text."""
        return len(self.batches.loader.data)

    def count(self, sequences: int | None) -> int:
        """How many sequences an evaluation of the first `sequences` reads; None: of all."""
        return self.sequences if sequences is None else min(sequences, self.sequences)

    def evaluate(self, model: nn.Module, sequences: int | None) -> Evaluation:
        """Evaluate a model on the first `sequences`; None: on all."""
        batches, names = self.batches.evaluation(self.count(sequences)), self.batches.loader.class_names
        return evaluate(model, self.objective, batches, self.token_bytes, names=names)


def evaluate_run(
    folder: Path, sequences: int | None, *, source: str | None = None, plugins: bool = False, ema: bool = False
) -> dict[str, float]:
    """Evaluate on the run's validation documents, or on `source`: step, loss, perplexity and bits per byte.

    Collective: several processes evaluate the model together, each its share of the sequences.
    """
    with leaving_process_group():
        loaded = load_run(folder, plugins=plugins, ema=ema)
        return _evaluate(loaded, folder, sequences, source)


def exit_curve_of_run(
    folder: Path,
    sequences: int | None,
    thresholds: list[float] | None = None,
    *,
    source: str | None = None,
    plugins: bool = False,
) -> list[dict[str, float | None]]:
    """Evaluate a run with exits at several thresholds of its policy, and last with all blocks; None: usual ones.

    Collective, as `evaluate_run`. ConfigError for a run without exits or policy, and thresholds out of range.
    """
    with leaving_process_group():
        loaded = load_run(folder, plugins=plugins)
        stack = stack_with_exits(loaded.model)
        policy = exit_policy_of(loaded.model)
        exits = None if stack is None else stack.find(Exits)
        if exits is None or policy is None:
            what = "the model has no exits" if exits is None else "the exits of the model have no policy"
            fix = "Train with model.stack.exits.policy, such as {criterion: entropy, threshold: 1}."
            raise ConfigError(str(folder), what, fix)
        count = len(exits.at)
        chosen = policy.thresholds(count, loaded.unpadded_vocabulary) if thresholds is None else thresholds
        problems = [
            problem
            for value in chosen
            for problem in policy.model_copy(update={"threshold": value}).check_threshold(count, "--thresholds")
        ]
        if problems:
            raise ConfigError(problems)
        with evaluation_data(loaded, source) as data:
            if data is None:
                raise no_validation(folder)
            batches = partial(data.batches.evaluation, data.count(sequences))
            points = exit_curve(loaded.model, batches, policy, [*chosen, None])
            return [{"step": loaded.step, **asdict(point)} for point in points]


def budget_curve_of_run(
    folder: Path, sequences: int | None, *, source: str | None = None, plugins: bool = False
) -> list[dict[str, float]]:
    """Evaluate a run with gates at each of their budgets. Collective, as `evaluate_run`."""
    with leaving_process_group():
        loaded = load_run(folder, plugins=plugins)
        if not gate_budgets(loaded.model):
            fix = "Train with block.gates, such as {budgets: [0.5, 1]}."
            raise ConfigError(str(folder), "the model has no gates, so it has no budgets", fix)
        with evaluation_data(loaded, source) as data:
            if data is None:
                raise no_validation(folder)
            batches = partial(data.batches.evaluation, data.count(sequences))
            return [{"step": loaded.step, **asdict(point)} for point in budget_curve(loaded.model, batches)]


def exit_policy_of(model: nn.Module) -> ExitPolicyConfig | None:
    """Return the policy of the model's exits; None: it has no exits, or they have none."""
    stack = stack_with_exits(model)
    exits = None if stack is None else stack.find(Exits)
    return None if exits is None else exits.config.policy


def no_validation(folder: Path) -> ConfigError:
    """Return the refusal of an evaluation on the validation documents of a run that has none."""
    fix = "Give other text with --data, or train with data.validation above 0."
    return ConfigError(str(folder), "the run has no validation documents", fix)


def _evaluate(loaded: LoadedRun, folder: Path, sequences: int | None, source: str | None) -> dict[str, float]:
    with evaluation_data(loaded, source) as data:
        if data is None:
            raise no_validation(folder)
        numbers = asdict(data.evaluate(loaded.model, sequences))
        metrics = numbers.pop("metrics")
        # Perplexity and bits per byte of labels are no numbers.
        return {"step": loaded.step, **{key: value for key, value in numbers.items() if value == value}, **metrics}


@contextmanager
def evaluation_data(loaded: LoadedRun, source: str | None = None) -> Iterator[EvaluationData | None]:
    """Open the run's validation documents, or the text of `source`; None where the run has none.

    Text is tokenised with the run's tokenizer: the run's own into its data folder, if that is gone; that of `source`
    into a temporary folder. ConfigError when the text is not there, or was tokenised with another tokenizer.
    """
    with shared_temporary_folder() as folder:
        loader = _open_source(loaded, source, folder) if source is not None else _open_validation(loaded)
        if loader is None:
            yield None
            return
        tokenizer, settings = loaded.tokenizer, loaded.settings
        objective: Objective = OBJECTIVES.build(
            settings.objective, special_tokens_of(tokenizer), settings.data.source_length, settings.run.seed
        )
        token_bytes = torch.from_numpy(tokenizer.byte_lengths()).to(loaded.mesh.device)
        yield EvaluationData(objective, make_micro_batches(settings, loader, objective, loaded.mesh), token_bytes)


@contextmanager
def shared_temporary_folder() -> Iterator[str]:
    """A temporary folder of rank 0 that all ranks use. Collective; ConfigError where a rank does not see it."""
    ranks = Consensus(doing="created")
    with tempfile.TemporaryDirectory(prefix="xscale-eval-") if ranks.is_rank0 else nullcontext("") as local_folder:
        folder: str = ranks.on_rank0(Path(tempfile.gettempdir()), lambda: local_folder)
        if not all(ranks.on_all(Path(folder), Path(folder).is_dir)):
            what = f"the text is tokenised into {folder}, which processes on other machines do not see"
            fix = "Evaluate on one machine, or set TMPDIR to a folder that all machines share."
            error = ConfigError("--data", what, fix)
            error.same_on_all_ranks = True
            raise error
        yield folder
        # Rank 0 removes the folder when no rank reads it any more.
        ranks.on_all(Path(folder), lambda: None)


def _open_validation(loaded: LoadedRun) -> Loader | None:
    settings, tokenizer = loaded.settings, loaded.tokenizer
    data = data_with_adopted_tokenizer(settings, tokenizer) or with_tokenizer(settings.data, tokenizer)
    of_run = (settings, loaded.mesh.rank_info)
    try:
        return prepare_and_open_data(*of_run, data, loaded.tokenizer, loaded.mesh).validation
    except ConfigError as error:
        fix = "Give text with --data, such as --data 'texts/*.txt'."
        problem = Problem("--data", "the run's validation documents cannot be opened from here", fix)
        raise ConfigError([*error.problems, problem]) from None


def _open_source(loaded: LoadedRun, source: str, folder: str) -> Loader:
    data = _data_of_source(loaded.settings, source, loaded.tokenizer, folder)
    corpus = prepare_and_open_data(loaded.settings, loaded.mesh.rank_info, data, loaded.tokenizer, loaded.mesh)
    return corpus.train if corpus.validation is None else corpus.validation


def _data_of_source(settings: Settings, source: str, tokenizer: Tokenizer, folder: str) -> DataConfig:
    """The settings' data with the text of `source`: a file, folder or glob, YAML of data.source, or prepared data."""
    data, path = settings.data, Path(source)
    base: dict[str, Any] = {"tokenizer": tokenizer.config, "prepared": None, "blend": (), "shuffle": False}
    if (path / MANIFEST).is_file() or suffixed(path, ".idx").is_file():
        return data.model_copy(update=base | {"prepared": source, "validation": 0.0})
    section: Any = {"kind": "jsonl" if ".jsonl" in path.name else "text", "paths": [source]}
    if settings.has_pairs:
        of_run = encode(data.source)
        section = {"kind": "pairs", "paths": [source]}
        section |= {key: of_run[key] for key in ("source_field", "target_field") if key in of_run}
    if source.lstrip().startswith("{"):
        section = parse(source, "--data")
    changes = {"source": decode(DataConfig, {"source": section}).source, "folder": folder, "validation": 0.0}
    return data.model_copy(update=base | changes)
