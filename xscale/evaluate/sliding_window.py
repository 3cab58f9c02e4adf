"""Perplexity of long texts with a sliding window, by the recipe of Hugging Face's transformers ("Perplexity of
fixed-length models"): windows overlap, and each token is scored once, in the first window that has it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.corpus.prepared import Split
from xscale.data.samples.blend import BlendedDataset
from xscale.evaluate.evaluate import evaluate
from xscale.evaluate.evaluate_run import evaluation_data, no_validation
from xscale.mesh.mesh import leaving_process_group
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Causal, Objective
from xscale.run.load_run import LoadedRun, load_run, read_settings
from xscale.run.run_data import special_tokens_of
from xscale.settings.scored_text import check_scores_text, with_sequence_length


@dataclass(frozen=True)
class TextWindow:
    """Tokens [begin, end) of a text, of which [scored, end) are scored."""

    text: int
    begin: int
    end: int
    scored: int


@dataclass(frozen=True)
class WindowScore:
    """Scores of texts with a sliding window."""

    step: int
    loss: float
    """Mean over the scored tokens, in nats."""
    perplexity: float
    bits_per_byte: float
    """Over the bytes that the scored tokens encode."""
    tokens: int
    """Tokens that are scored."""
    window: int
    stride: int


def windows_of(text: int, length: int, window: int, stride: int) -> Iterator[TextWindow]:
    """Yield the windows over `length` tokens; each begins `stride` tokens after the one before.

    Behind the first window a scored token has `window` - `stride` tokens of context or more. The first token of a text
    is not scored, as nothing precedes it, nor is that of each window if `stride` is `window`.
    """
    scored = 0
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        if (first := max(scored, begin + 1)) < end:
            yield TextWindow(text, begin, end, first)
        if end == length:
            return
        scored = end


class WindowBatches:
    """Micro-batches of windows of one length, distributed over the data-parallel ranks."""

    def __init__(
        self,
        texts: Sequence[NDArray[Any]],
        window: int,
        stride: int,
        micro_batch: int,
        limit: int | None = None,
    ) -> None:
        """`texts`: tokens of each. `limit`: how many windows are scored; None: all."""
        self.texts = texts
        self.groups: list[list[TextWindow]] = []
        """The windows of each micro-batch."""
        pending: dict[int, list[TextWindow]] = {}
        numbered = (
            windows_of(number, len(text), window, stride) for number, text in enumerate(texts)
        )
        for item in islice((item for items in numbered for item in items), limit):
            group = pending.setdefault(item.end - item.begin, [])
            group.append(item)
            if len(group) == micro_batch:
                self.groups.append(pending.pop(item.end - item.begin))
        self.groups += pending.values()

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return sum(item.end - item.scored for group in self.groups for item in group)

    def batches(self, rank: int, ranks: int, device: torch.device) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of a data-parallel rank, as many on every rank; the flag is false for those that
        another rank counts."""
        for round_ in range(-(-len(self.groups) // ranks)):
            number = round_ * ranks + rank
            counts = number < len(self.groups)
            yield self._batch(self.groups[number if counts else 0]).to(device), counts

    def _batch(self, group: list[TextWindow]) -> Batch:
        rows = [self.texts[item.text][item.begin : item.end].astype(np.int64) for item in group]
        ids = torch.from_numpy(np.stack(rows))  # [B, T]
        targets = torch.full_like(ids, IGNORE_INDEX)
        targets[:, :-1] = ids[:, 1:]
        for row, item in zip(targets, group, strict=True):
            row[: item.scored - item.begin - 1] = IGNORE_INDEX
        return Batch(Tokens.from_ids(ids), targets)


def texts_of(splits: Sequence[Split], *, cross_documents: bool) -> list[NDArray[Any]]:
    """Return the tokens of each document; with `cross_documents` those of each split end to end, as in training."""
    if cross_documents:
        return [split.tokens for split in splits]
    return [
        split.tokens[first:stop]
        for split in splits
        for first, stop in pairwise(split.starts.tolist())
    ]


def evaluate_windows(
    folder: Path,
    window: int,
    stride: int,
    windows: int | None = None,
    *,
    source: str | None = None,
    plugins: bool = False,
    ema: bool = False,
) -> dict[str, Any]:
    """Evaluate a run on its validation documents, or on `source`, with a sliding window: fields of `WindowScore`.

    `windows`: how many are read, None: all. Collective, as `evaluate_run`. ConfigError for a model that does not score
    text, and for a window or stride that cannot be.
    """
    if window < 2:
        raise ConfigError(
            "--window", f"is {window}, and a token needs one before it", "Take 2 or more."
        )
    if not 1 <= stride <= window:
        what = (
            f"is {stride}, and windows of {window} tokens would leave tokens out"
            if stride > window
            else "is none"
        )
        raise ConfigError("--stride", what, f"Take 1 to {window}, the window; half of it is usual.")
    with leaving_process_group():
        longest = max(window, read_settings(folder, plugins=plugins).data.sequence_length)
        loaded = load_run(
            folder, plugins=plugins, ema=ema, sequence_length=longest, option="--window"
        )
        if problems := check_scores_text(loaded.settings, loaded.model, "--window"):
            raise ConfigError(problems)
        return asdict(_score(loaded, folder, window, stride, windows, source))


def _score(
    loaded: LoadedRun,
    folder: Path,
    window: int,
    stride: int,
    windows: int | None,
    source: str | None,
) -> WindowScore:
    settings = loaded.settings
    # A text may be shorter than a sample of the run.
    with evaluation_data(
        replace(loaded, settings=with_sequence_length(settings, 1)), source
    ) as data:
        if data is None:
            raise no_validation(folder)
        dataset: Any = data.batches.loader.data
        datasets: list[Any] = (
            list(dataset.datasets) if isinstance(dataset, BlendedDataset) else [dataset]
        )
        splits = [part.split for part in datasets]
        texts = texts_of(splits, cross_documents=settings.data.cross_documents)
        batches = WindowBatches(texts, window, stride, settings.train.micro_batch_size, windows)
        objective: Objective = OBJECTIVES.build(
            Causal.Config(), special_tokens_of(loaded.tokenizer), window, 0
        )
        parts = batches.batches(data.batches.rank, data.batches.ranks, loaded.mesh.device)
        result = evaluate(loaded.model, objective, parts, data.token_bytes)
    numbers = (result.loss, result.perplexity, result.bits_per_byte)
    return WindowScore(loaded.step, *numbers, batches.tokens, window, stride)
