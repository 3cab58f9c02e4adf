"""A run's model for the lm-evaluation-harness of EleutherAI (`lm_eval`): the only file that imports it.

Texts are encoded, and tokens of context and continuation split, as lm_eval does for the models of Hugging Face, so that
the same model has the same scores in both: a context begins as the run's documents do, and the name of a special token
in a text is that token. Where there is no context, as in rolling log-likelihoods, the prefix is the beginning of text,
or the end-of-document token of a run whose texts have no beginning.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from xscale.core.errors import ConfigError
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.evaluate.text_scorer import Score, ScoreRequest, TextRequest

GREEDY_KEYS = {"until", "do_sample", "temperature", "top_k", "max_gen_toks", "seed"}
"""Settings of generation that are read; others are refused."""


class Scorer(Protocol):
    """Scores and writes text: `TextScorer`, on this rank or on all."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]: ...

    def write(self, requests: Sequence[TextRequest]) -> list[str]: ...


@dataclass(frozen=True)
class TaskRequest:
    """Tasks of lm_eval to evaluate."""

    names: tuple[str, ...]
    shots: int | None = None
    """Examples before each question; None: as many as the task says, or none."""
    limit: int | None = None
    """Examples of each task; None: all."""
    folder: str | None = None
    """Folder with further tasks as YAML; None: lm_eval's alone."""
    path: str = "--tasks"
    """Option or key that asks for them, for messages."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values that tasks may read, such as the longest text."""


class _LmMethods:
    """The methods that lm_eval's TemplateLM leaves to a model; it makes requests of texts ones of tokens."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, window: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.text_tokenizer = tokenizer
        self.max_length = window

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        tokenizer = self.text_tokenizer
        # That of a tokenizer trained here is in no text that a model was trained on, unless documents begin with it.
        has_begin = bool(tokenizer.prefix) or getattr(tokenizer.config, "file", None) is not None
        return tokenizer.bos if tokenizer.bos is not None and has_begin else tokenizer.eos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        tokenizer = self.text_tokenizer
        # A text that has a beginning of its own, such as a chat, gets no second.
        has_begin = add_special_tokens is None and string.startswith(
            tokenizer.piece(self.prefix_token_id)
        )
        begin = () if add_special_tokens is False or has_begin else tokenizer.prefix
        return [*begin, *tokenizer.encode_with_special_tokens(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        scores = self.scorer.score(
            [ScoreRequest(context, continuation) for _, context, continuation in requests]
        )
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        utils = importlib.import_module("lm_eval.utils")
        pairs: list[ScoreRequest] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = utils.get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, windows):
                pairs.append(ScoreRequest(context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, score in zip(owners, self.scorer.score(pairs), strict=True):
            totals[number] += score.log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [
            self._text_request(request.args[0], request.args[1], number)
            for number, request in enumerate(requests)
        ]
        return self.scorer.write(texts)

    def _text_request(self, context: str, settings: Mapping[str, Any], seed: int) -> TextRequest:
        models = importlib.import_module("lm_eval.models.utils")
        options = models.normalize_gen_kwargs(dict(settings), 256)
        if unknown := sorted(options.keys() - GREEDY_KEYS):
            fix = f"These settings of generation are read: {', '.join(sorted(GREEDY_KEYS))}."
            raise ConfigError("tasks", f"a task generates with {', '.join(unknown)}", fix)
        until = options["until"]
        stops = (until,) if isinstance(until, str) else tuple(until)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        temperature = float(options["temperature"]) if options["do_sample"] else 0.0
        return TextRequest(
            ids,
            options["max_gen_toks"],
            tuple(stop for stop in stops if stop),
            temperature,
            options.get("top_k"),
            int(options.get("seed", seed)),
        )


def lm_eval_model(scorer: Scorer, tokenizer: Tokenizer, window: int) -> Any:
    """Return a model for `lm_eval.simple_evaluate` that reads `window` tokens at most."""
    template = importlib.import_module("lm_eval.api.model").TemplateLM
    return type("XscaleLM", (_LmMethods, template), {"tokenizer_name": "xscale"})(
        scorer, tokenizer, window
    )


def evaluate_tasks(model: Any, request: TaskRequest) -> dict[str, dict[str, float]]:
    """Evaluate tasks on one process: task or group -> metric -> value, with the standard errors as `<metric>_stderr`.

    A metric behind a filter is `<metric>,<filter>`. ConfigError for a task that cannot be loaded.
    """
    tasks = load_tasks(request)
    for task in tasks["tasks"].values():
        shots = task.get_config("num_fewshot")
        # A task that is made for no examples keeps that.
        if request.shots is not None and shots != 0:
            task.set_config(key="num_fewshot", value=request.shots)
        elif shots is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    evaluator = importlib.import_module("lm_eval.evaluator")
    results = evaluator.evaluate(lm=model, task_dict=tasks, limit=request.limit, log_samples=False)
    return {name: _numbers(values) for name, values in results["results"].items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the results of a task, without the name of the filter that is none."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and key != "sample_len"
    }


def load_tasks(request: TaskRequest) -> Any:
    """Load the tasks and their data, from the folder alone where it has them all: lm_eval has thousands of files.

    ConfigError for a task that is not there or cannot be loaded.
    """
    manager_type = importlib.import_module("lm_eval.tasks").TaskManager
    options = {"metadata": dict(request.metadata)}
    manager = None
    if request.folder is not None:
        if not Path(request.folder).is_dir():
            raise ConfigError(
                request.path,
                f"there is no folder {request.folder}",
                "Give a folder of tasks as YAML.",
            )
        manager = manager_type(include_path=request.folder, include_defaults=False, **options)
    if manager is None or not set(request.names) <= set(manager.all_tasks):
        manager = manager_type(include_path=request.folder, **options)
    if unknown := [name for name in request.names if name not in manager.all_tasks]:
        from difflib import get_close_matches

        nearest = get_close_matches(unknown[0], manager.all_tasks, 3)
        fix = (
            f"The nearest are {', '.join(nearest)}."
            if nearest
            else "`lm_eval ls tasks` lists them."
        )
        raise ConfigError(request.path, f"lm_eval has no task '{unknown[0]}'", fix)
    try:
        return manager.load(list(request.names))
    # The library raises errors of many kinds: of the network, the data, its packages.
    except Exception as error:
        what = f"lm_eval cannot load the tasks: {type(error).__name__}: {str(error).splitlines()[0][:300]}"
        fix = "Its data are downloaded once from the Hugging Face Hub: load them on a machine with a network."
        raise ConfigError(request.path, what, fix) from error
