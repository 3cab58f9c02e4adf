"""Tasks of lm_eval with a run's model: after a run, or every some steps of it. Rank 0 asks, and all ranks compute."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xscale.core.errors import ConfigError
from xscale.evaluate.lm_eval_model import TaskRequest, evaluate_tasks, lm_eval_model, load_tasks
from xscale.evaluate.text_scorer import Score, ScoreRequest, TextRequest, TextScorer
from xscale.mesh.consensus import Consensus, attempt
from xscale.mesh.mesh import leaving_process_group
from xscale.observe import TaskReport
from xscale.run.load_run import LoadedRun, load_run
from xscale.run.parts import RunParts
from xscale.settings.scored_text import check_lm_eval, check_scores_text
from xscale.settings.settings import TasksConfig

TaskResults = dict[str, dict[str, float]]
"""Task or group -> metric -> value."""


@dataclass(frozen=True)
class _Announced:
    """The scorer of rank 0, which tells the other ranks the requests first."""

    scorer: TextScorer
    ranks: Consensus

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self._announce("score", requests)
        return self.scorer.score(requests)

    def write(self, requests: Sequence[TextRequest]) -> list[str]:
        self._announce("write", requests)
        return self.scorer.write(requests)

    def _announce(self, command: str, requests: Any) -> None:
        self.ranks.on_rank0(Path("tasks"), lambda: (command, requests))


def evaluate_on_all_ranks(
    scorer: TextScorer, ranks: Consensus, work: Callable[[_Announced], TaskResults]
) -> TaskResults:
    """Do `work` on rank 0, with a scorer by which all ranks compute; return its results on each. Collective.

    Only rank 0 reads the tasks and needs lm_eval. Its failure is raised on all ranks.
    """
    where = Path("tasks")
    if ranks.is_rank0:
        with _own_random_numbers():
            outcome = attempt(lambda: work(_Announced(scorer, ranks)))
        last: Any = ranks.on_rank0(where, lambda: ("done", outcome.unwrap()))
        return dict(last[1])
    while True:
        message: Any = ranks.on_rank0(where, lambda: None)
        command, argument = message
        if command == "done":
            return dict(argument)
        try:
            getattr(scorer, command)(argument)
        except ConfigError:
            # Rank 0 refuses the same requests, and tells so next.
            continue


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Seed the generators that tasks draw from, and give the run its own back."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(0)
            np.random.seed(1234)
            torch.default_generator.manual_seed(1234)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _request_of(tasks: TasksConfig) -> TaskRequest:
    return TaskRequest(tasks.names, tasks.shots, tasks.limit, tasks.folder, "train.tasks")


def require_tasks(tasks: TasksConfig, ranks: Consensus) -> None:
    """Load the tasks of a run on rank 0, so that one that cannot be loaded is refused before the first step."""

    def load() -> None:
        load_tasks(_request_of(tasks))

    if tasks.names:
        ranks.on_rank0(Path("tasks"), load)


def report_tasks(parts: RunParts, step: int, on_forward: Callable[[], None]) -> TaskReport:
    """Evaluate the tasks of a run's config with its model as it is. Collective.

    `on_forward` is called before each forward, and before rank 0 loads the tasks.
    """
    begin = time.perf_counter()
    on_forward()
    settings, tokenizer = parts.settings, parts.corpus.tokenizer
    window = settings.data.sequence_length
    rows = settings.train.micro_batch_size
    tasks = settings.train.tasks
    scorer = TextScorer(
        parts.model, parts.mesh, window, rows, tokenizer.decode, tokenizer.eos, on_forward
    )
    request = _request_of(tasks)
    results = evaluate_on_all_ranks(
        scorer,
        Consensus(parts.mesh.background),
        lambda announced: evaluate_tasks(lm_eval_model(announced, tokenizer, window), request),
    )
    flat = {
        f"{task}/{name}": value
        for task, values in results.items()
        for name, value in values.items()
    }
    return TaskReport(step, flat, time.perf_counter() - begin)


def tasks_of_run(
    folder: Path, request: TaskRequest, *, plugins: bool = False, ema: bool = False
) -> dict[str, Any]:
    """Evaluate tasks of lm_eval with the run's newest checkpoint: step and results. Collective.

    ConfigError for a model that does not score text, without lm_eval, and for tasks that cannot be loaded.
    """
    with leaving_process_group():
        loaded, scorer = _scorer_of_run(folder, request.path, plugins=plugins, ema=ema)

        def work(announced: _Announced) -> TaskResults:
            return evaluate_tasks(
                lm_eval_model(announced, loaded.tokenizer, scorer.window), request
            )

        return {
            "step": loaded.step,
            "tasks": evaluate_on_all_ranks(scorer, Consensus(loaded.mesh.background), work),
        }


def lm_eval_model_of_run(folder: Path, *, plugins: bool = False, ema: bool = False) -> Any:
    """Return the model of a run's newest checkpoint for the functions of lm_eval, on this process alone.

    `plugins`: import the modules that the run's config names. `ema`: take the moving average of the weights.
    ConfigError for a model that does not score text, and without lm_eval.
    """
    loaded, scorer = _scorer_of_run(folder, str(folder), plugins=plugins, ema=ema)
    return lm_eval_model(scorer, loaded.tokenizer, scorer.window)


def _scorer_of_run(
    folder: Path, path: str, *, plugins: bool, ema: bool
) -> tuple[LoadedRun, TextScorer]:
    """Load a run and its scorer; ConfigError at `path`."""
    if problems := check_lm_eval(path):
        raise ConfigError(problems)
    loaded = load_run(folder, plugins=plugins, ema=ema)
    settings, tokenizer = loaded.settings, loaded.tokenizer
    if problems := check_scores_text(settings, loaded.model, path):
        raise ConfigError(problems)
    window, rows = settings.data.sequence_length, settings.train.micro_batch_size
    return loaded, TextScorer(
        loaded.model, loaded.mesh, window, rows, tokenizer.decode, tokenizer.eos
    )
