"""Evaluate a run on its validation documents or on other text, with nothing but the run folder."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.core.say import say_aside
from xscale.core.yaml_reader import parse
from xscale.data.config import DataConfig
from xscale.data.corpus.manifest import MANIFEST
from xscale.data.corpus.stored_tokenizer import with_tokenizer
from xscale.data.indexed import suffixed
from xscale.data.samples.loader import Loader
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.evaluate.budget_curve import budget_curve, gate_budgets
from xscale.evaluate.evaluate import Evaluation, capacity_notes, evaluate
from xscale.evaluate.exit_curve import exit_curve
from xscale.evaluate.logit_scores import LogitScores
from xscale.evaluate.record_routes import RouteRecording
from xscale.generate.exit_policy import exit_policy_of, stack_with_exits
from xscale.mesh.consensus import Consensus
from xscale.mesh.mesh import leaving_process_group
from xscale.nn.depth.exits import Exits
from xscale.objective.objective import OBJECTIVES, Batch, Objective
from xscale.run.init_weights import data_with_adopted_tokenizer
from xscale.run.load_run import LoadedRun, load_run
from xscale.run.route_replay import (
    number_routes,
    open_replay,
    replay_file,
    require_routes,
    route_layout,
    with_routes,
)
from xscale.run.run_data import make_micro_batches, prepare_and_open_data, special_tokens_of
from xscale.settings.settings import Settings
from xscale.step.batches import MicroBatches


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

    def new_scores(self) -> LogitScores:
        """Return empty sums of an evaluation by logits."""
        return LogitScores(self.objective, self.batches.loader.class_names)

    def evaluate(
        self, model: nn.Module, sequences: int | None, recording: RouteRecording | None = None
    ) -> Evaluation:
        """Evaluate a model on the first `sequences`; None: on all. `recording`: gets the routes of their tokens."""
        batches: Iterable[tuple[Batch, bool]] = self.batches.evaluation(self.count(sequences))
        names = self.batches.loader.class_names
        require_routes(self.batches, self.count(sequences), Consensus(doing="read"))
        if recording is not None:
            batches = recording.record(batches, self.batches)
        return evaluate(model, self.objective, batches, self.token_bytes, names=names)


def evaluate_run(
    folder: Path,
    sequences: int | None,
    *,
    source: str | None = None,
    plugins: bool = False,
    ema: bool = False,
    record_routes: Path | None = None,
    training_samples: int = 0,
    replay_routes: Path | None = None,
) -> dict[str, float]:
    """Evaluate on the run's validation documents, or on `source`: step, loss, perplexity and bits per byte.

    Collective: several processes evaluate the model together, each its share of the sequences. `record_routes`: a file
    to which the routes of the tokens through the mixtures of experts are written, and after them those of the first
    `training_samples` that the run trains on. A file that cannot be written is said in a line, and the evaluation goes
    on. `replay_routes`: a file of routes that takes the place of the routers, and of what the run replays.
    ConfigError for a model whose tokens have none, and a file that lacks a text.
    """
    with leaving_process_group():
        loaded = load_run(folder, plugins=plugins, ema=ema)
        if replay_routes is not None:
            replay_file(loaded.model, replay_routes)
        recording = None
        if record_routes is not None:
            layout = route_layout(loaded.model, loaded.tokenizer.fingerprint, "--record-routes")
            number_routes(loaded.model, layout, replaying=False)
            recording = RouteRecording(record_routes, layout, loaded.tokenizer.vocabulary)
        numbers = _evaluate(loaded, folder, sequences, source, recording)
        if recording is not None:
            if training_samples:
                with evaluation_data(loaded, training=True) as data:
                    assert data is not None, "a run has training samples"
                    data.evaluate(loaded.model, training_samples, recording)
            if note := recording.finish():
                say_aside(note)
        return numbers


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
            what = (
                "the model has no exits"
                if exits is None
                else "the exits of the model have no policy"
            )
            fix = "Train with model.stack.exits.policy, such as {criterion: entropy, threshold: 1}."
            raise ConfigError(str(folder), what, fix)
        count = len(exits.at)
        head = OBJECTIVES.of(loaded.settings.objective).part.head_sizes(loaded.settings.objective)
        outputs = loaded.unpadded_vocabulary if head is None else head.outputs
        chosen = policy.thresholds(count, outputs) if thresholds is None else thresholds
        problems = [
            problem
            for value in chosen
            for problem in policy.model_copy(update={"threshold": value}).check_threshold(
                count, "--thresholds"
            )
        ]
        if problems:
            raise ConfigError(problems)
        with evaluation_data(loaded, source) as data:
            if data is None:
                raise no_validation(folder)
            batches = partial(data.batches.evaluation, data.count(sequences))
            points = exit_curve(loaded.model, batches, policy, [*chosen, None], data.new_scores)
            return [_row(loaded.step, point) for point in points]


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
            return [
                _row(loaded.step, point)
                for point in budget_curve(loaded.model, batches, data.new_scores)
            ]


def _row(step: int, point: Any) -> dict[str, Any]:
    """Return a point of a curve as a row of numbers, with its metrics by name."""
    numbers = asdict(point)
    metrics = numbers.pop("metrics")
    return {"step": step, **numbers, **metrics}


def no_validation(folder: Path) -> ConfigError:
    """Return the refusal of an evaluation on the validation documents of a run that has none."""
    fix = "Give other text with --data, or train with data.validation above 0."
    return ConfigError(str(folder), "the run has no validation documents", fix)


def _evaluate(
    loaded: LoadedRun,
    folder: Path,
    sequences: int | None,
    source: str | None,
    recording: RouteRecording | None = None,
) -> dict[str, float]:
    with evaluation_data(loaded, source) as data:
        if data is None:
            raise no_validation(folder)
        if loaded.mesh.rank_info.is_rank0:
            for note in capacity_notes(loaded.model):
                say_aside(note)
        numbers = asdict(data.evaluate(loaded.model, sequences, recording))
        metrics = numbers.pop("metrics")
        if data.batches.new_states is not None:
            alone = replace(data, batches=replace(data.batches, new_states=None))
            without = alone.evaluate(loaded.model, sequences)
            metrics["loss_without_memory"] = without.loss
            metrics["perplexity_without_memory"] = without.perplexity
        # Perplexity and bits per byte of labels are no numbers.
        return {
            "step": loaded.step,
            **{key: value for key, value in numbers.items() if value == value},
            **metrics,
        }


@contextmanager
def evaluation_data(
    loaded: LoadedRun, source: str | None = None, *, training: bool = False
) -> Iterator[EvaluationData | None]:
    """Open the run's validation documents, the samples that it trains on (`training`), or the text of `source`; None
    where the run has none.

    Text is tokenised with the run's tokenizer: the run's own into its data folder, if that is gone; that of `source`
    into a temporary folder. ConfigError when the text is not there, or was tokenised with another tokenizer.
    """
    with shared_temporary_folder() as folder:
        loader = (
            _open_source(loaded, source, folder)
            if source is not None
            else _open_data_of_run(loaded, training=training)
        )
        if loader is None:
            yield None
            return
        tokenizer, settings = loaded.tokenizer, loaded.settings
        replay = open_replay(loaded.model, tokenizer, Consensus(doing="read"))
        objective: Objective = OBJECTIVES.build(
            settings.objective,
            special_tokens_of(tokenizer),
            settings.data.source_length,
            settings.run.seed,
        )
        objective, _ = with_routes(replay, loaded.model, objective)
        token_bytes = torch.from_numpy(tokenizer.byte_lengths()).to(loaded.mesh.device)
        yield EvaluationData(
            objective,
            make_micro_batches(settings, loader, objective, loaded.mesh, model=loaded.model),
            token_bytes,
        )


@contextmanager
def shared_temporary_folder() -> Iterator[str]:
    """A temporary folder of rank 0 that all ranks use. Collective; ConfigError where a rank does not see it."""
    ranks = Consensus(doing="created")
    with (
        tempfile.TemporaryDirectory(prefix="xscale-eval-")
        if ranks.is_rank0
        else nullcontext("") as local_folder
    ):
        folder: str = ranks.on_rank0(Path(tempfile.gettempdir()), lambda: local_folder)
        if not all(ranks.on_all(Path(folder), Path(folder).is_dir)):
            what = (
                f"the text is tokenised into {folder}, which processes on other machines do not see"
            )
            fix = "Evaluate on one machine, or set TMPDIR to a folder that all machines share."
            error = ConfigError("--data", what, fix)
            error.same_on_all_ranks = True
            raise error
        yield folder
        # Rank 0 removes the folder when no rank reads it any more.
        ranks.on_all(Path(folder), lambda: None)


def _open_data_of_run(loaded: LoadedRun, *, training: bool) -> Loader | None:
    settings, tokenizer = loaded.settings, loaded.tokenizer
    data = data_with_adopted_tokenizer(settings, tokenizer) or with_tokenizer(
        settings.data, tokenizer
    )
    of_run = (settings, loaded.mesh.rank_info)
    try:
        corpus = prepare_and_open_data(*of_run, data, loaded.tokenizer, loaded.mesh)
        return corpus.train if training else corpus.validation
    except ConfigError as error:
        fix = "Give text with --data, such as --data 'texts/*.txt'."
        problem = Problem(
            "--data", "the run's validation documents cannot be opened from here", fix
        )
        raise ConfigError([*error.problems, problem]) from None


def _open_source(loaded: LoadedRun, source: str, folder: str) -> Loader:
    data = _data_of_source(loaded.settings, source, loaded.tokenizer, folder)
    corpus = prepare_and_open_data(
        loaded.settings, loaded.mesh.rank_info, data, loaded.tokenizer, loaded.mesh
    )
    return corpus.train if corpus.validation is None else corpus.validation


def _data_of_source(
    settings: Settings, source: str, tokenizer: Tokenizer, folder: str
) -> DataConfig:
    """The settings' data with the text of `source`: a file, folder or glob, YAML of data.source, or prepared data."""
    data, path = settings.data, Path(source)
    base: dict[str, Any] = {
        "tokenizer": tokenizer.config,
        "prepared": None,
        "blend": (),
        "order": "text",
    }
    if (path / MANIFEST).is_file() or suffixed(path, ".idx").is_file():
        return data.model_copy(update=base | {"prepared": source, "validation": 0.0})
    section: Any = {"kind": "jsonl" if ".jsonl" in path.name else "text", "paths": [source]}
    if settings.has_pairs:
        of_run = encode(data.source)
        section = {"kind": "pairs", "paths": [source]}
        section |= {key: of_run[key] for key in ("source_field", "target_field") if key in of_run}
    if source.lstrip().startswith("{"):
        section = parse(source, "--data")
    changes = {
        "source": decode(DataConfig, {"source": section}).source,
        "folder": folder,
        "validation": 0.0,
    }
    return data.model_copy(update=base | changes)
