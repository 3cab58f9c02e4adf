"""`xscale data stats`: facts of prepared data, or of the data of a recipe, as text or JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xscale.core.config import decode
from xscale.data.config import DataConfig
from xscale.data.corpus.histogram import bars
from xscale.data.corpus.manifest import MANIFEST, DatasetManifest
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import PreparedData, Split, open_prepared
from xscale.data.corpus.stats import (
    Counted,
    SplitStatistics,
    count_tokens,
    split_statistics,
    whole_pair,
)
from xscale.data.indexed import IndexedDataset, suffixed
from xscale.data.progress import ProgressBar
from xscale.data.samples.blend import BlendedDataset
from xscale.data.samples.labelled import LabelledDataset
from xscale.data.samples.loader import Loader, open_corpus
from xscale.data.samples.packed import ShuffledDataset
from xscale.data.samples.pairs import PairDataset
from xscale.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xscale.recipe import Recipe

LARGE = 1 << 28
"""Bytes of tokens from which on progress is shown."""


@dataclass(frozen=True)
class Draw:
    """Samples that a run of a recipe reads of a dataset."""

    weight: float
    """Weight of the config, not normalised."""
    samples: int
    """Samples of all steps."""
    token_share: float
    """Share of the tokens, without padding, that the run reads of all its datasets."""
    epochs: float


@dataclass(frozen=True)
class DatasetStatistics:
    """Facts of one prepared dataset."""

    path: str
    tokenizer: str | None
    """Kind; None where it is not known."""
    fingerprint: str | None
    vocabulary: int | None
    draw: Draw | None
    """None where no recipe is given."""
    splits: list[SplitStatistics]


@dataclass(frozen=True)
class DataStatistics:
    """Facts of the data of a recipe, or of one prepared dataset."""

    sequence_length: int | None
    """data.sequence_length of the recipe; None without one, as the next two are."""
    steps: int | None
    batch_size: int | None
    datasets: list[DatasetStatistics]


def stats_of_prepared(path: Path) -> DataStatistics:
    """Count the prepared data in the folder `path`, or the pair of that prefix. ConfigError when it is damaged."""
    if not (path / MANIFEST).exists() and suffixed(path, ".idx").exists():
        split = whole_pair(IndexedDataset(path))
        with _progress([split]) as bar:
            counted = count_tokens(split, None, bar.advance)
        statistics = split_statistics(split, counted, tokenizer=None)
        return DataStatistics(
            None, None, None, [DatasetStatistics(str(path), None, None, None, None, [statistics])]
        )
    manifest = DatasetManifest.load(path / MANIFEST)
    config = decode(DataConfig, {"tokenizer": manifest.tokenizer}).model_copy(
        update={"prepared": str(path)}
    )
    prepared = open_prepared(config)
    with _progress(_splits(prepared)) as bar:
        return DataStatistics(None, None, None, [_dataset(prepared, config, {}, None, bar)])


def stats_of_recipe(recipe: "Recipe") -> DataStatistics:
    """Count the data of a recipe, which is prepared first where necessary. Raises as `prepare` and `open_corpus`."""
    prepare(recipe.data)
    corpus = open_corpus(recipe.data, seed=recipe.run.seed)
    train, validation = _members(corpus.train), _members(corpus.validation)
    draws = _draws(recipe, corpus.train, train)
    datasets = []
    with _progress([split for prepared in corpus.sets for split in _splits(prepared)]) as bar:
        for prepared, draw in zip(corpus.sets, draws, strict=True):
            samples = {"train": train.pop(0)}
            if prepared.validation is not None:
                samples["validation"] = validation.pop(0)
            datasets.append(_dataset(prepared, recipe.data, samples, draw, bar))
    return DataStatistics(
        recipe.data.sequence_length, recipe.train.steps, recipe.train.batch_size, datasets
    )


def _members(loader: Loader | None) -> list[ShuffledDataset]:
    """Return the datasets of a loader: one, or those of a blend."""
    if loader is None:
        return []
    data = loader.data
    members = data.datasets if isinstance(data, BlendedDataset) else [data]
    return [member for member in members if isinstance(member, ShuffledDataset)]


def _draws(recipe: "Recipe", loader: Loader, members: list[ShuffledDataset]) -> list[Draw]:
    """Return what the run draws from each dataset in all its steps."""
    data, samples = loader.data, recipe.train.steps * recipe.train.batch_size
    drawn = data.drawn(samples) if isinstance(data, BlendedDataset) else [samples]
    weights = [item.weight for item in recipe.data.blend] or [1.0]
    # Samples have the same shape in all datasets, so that tokens go by what is no padding in them.
    tokens = [
        count * (1 - (member.padding_share() or 0.0))
        for count, member in zip(drawn, members, strict=True)
    ]
    return [
        Draw(weight, count, token_count / sum(tokens), count / len(member))
        for weight, count, token_count, member in zip(weights, drawn, tokens, members, strict=True)
    ]


def _splits(prepared: PreparedData) -> list[Split]:
    return [split for split in (prepared.train, prepared.validation) if split is not None]


def _progress(splits: list[Split]) -> ProgressBar:
    total = sum(split.tokens.nbytes for split in splits)
    return ProgressBar("counting tokens", total, shown=total >= LARGE)


def _dataset(
    prepared: PreparedData,
    config: DataConfig,
    samples: dict[str, ShuffledDataset],
    draw: Draw | None,
    bar: ProgressBar,
) -> DatasetStatistics:
    """Count one dataset; `samples` are those of its splits, none where no recipe is given."""
    tokenizer: Tokenizer = prepared.tokenizer
    rows: list[SplitStatistics] = []
    train: Counted | None = None
    for split in _splits(prepared):
        counted = count_tokens(split, tokenizer.vocabulary, bar.advance)
        dataset = samples.get(split.name)
        rows.append(
            split_statistics(
                split,
                counted,
                tokenizer=tokenizer,
                size=None
                if prepared.manifest is None
                else prepared.manifest.counts[split.name].bytes,
                longer=None if dataset is None else _longer(split, dataset, config),
                padding=None if dataset is None else dataset.padding_share(),
                train=train,
            )
        )
        train = counted if train is None else train
    kind, path = tokenizer.config.kind, str(prepared.path)
    return DatasetStatistics(path, kind, tokenizer.fingerprint, tokenizer.vocabulary, draw, rows)


def _longer(split: Split, dataset: ShuffledDataset, config: DataConfig) -> float:
    """Return the share of documents that are longer than a sample."""
    if isinstance(dataset, LabelledDataset):
        return dataset.truncated() / len(dataset)
    if isinstance(dataset, PairDataset):
        return float(
            (split.pair_lengths > [config.source_length, config.target_length]).any(1).mean()
        )
    return float((np.diff(split.starts) > config.sequence_length).mean())


def to_json(statistics: DataStatistics) -> str:
    """Encode the statistics as JSON."""
    return json.dumps(asdict(statistics), indent=2)


def to_text(statistics: DataStatistics) -> Iterator[str]:
    """Yield the lines that describe the statistics."""
    if statistics.steps is not None and statistics.batch_size is not None:
        samples = statistics.steps * statistics.batch_size
        yield f"run: {statistics.steps:,} steps of {statistics.batch_size:,} sequences, {samples:,} samples"
    for dataset in statistics.datasets:
        known = f"{dataset.tokenizer}, {dataset.vocabulary or 0:,} ids, fingerprint {dataset.fingerprint}"
        yield f"{dataset.path}: " + (
            "a pair without manifest" if dataset.tokenizer is None else known
        )
        if dataset.draw is not None:
            draw = dataset.draw
            blended = f", weight {draw.weight:g}, {_percent(draw.token_share)} of the run's tokens"
            member = blended if len(statistics.datasets) > 1 else ""
            yield f"  {draw.samples:,} samples drawn{member}, {draw.epochs:.3g} epochs"
        for split in dataset.splits:
            yield from _split_text(split, statistics.sequence_length)


def _split_text(split: SplitStatistics, sequence_length: int | None) -> Iterator[str]:
    yield ""
    size = "" if split.bytes is None else f", {split.bytes:,} bytes"
    rate = "" if split.bytes_per_token is None else f", {split.bytes_per_token:.2f} bytes per token"
    yield f"{split.name}: {split.documents:,} documents, {split.tokens:,} tokens{size}{rate}"
    if (lengths := split.tokens_per_document) is not None:
        summary = f"mean {lengths.mean:,.1f}, median {lengths.median:,.1f}, p90 {lengths.p90:,}, p99 {lengths.p99:,}"
        yield f"  tokens per document: {summary}, max {lengths.max:,}"
        yield from (f"  {line}" for line in bars(split.histogram))
    if split.longer is not None:
        longer = (
            "truncated" if split.padding is not None else f"longer than {sequence_length:,} tokens"
        )
        yield f"  {longer}: {_percent(split.longer)} of the documents"
    if split.padding is not None:
        yield f"  padding: {_percent(split.padding)} of an epoch's tokens"
    vocabulary = "" if split.vocabulary is None else f" of {split.vocabulary:,} in the vocabulary"
    yield f"  distinct tokens: {split.distinct_tokens:,}{vocabulary}"
    if split.unknown is not None:
        yield f"  unknown tokens: {_percent(split.unknown)}"
    if split.duplicate_share is not None:
        yield f"  exact duplicates: {split.duplicates:,}, {_percent(split.duplicate_share)} of the documents"
    if split.repeated_from_train is not None:
        yield f"  also in the train split: {split.repeated_from_train:,}"
    if split.most_frequent:
        total = sum(token.share for token in split.most_frequent)
        yield f"  the {len(split.most_frequent)} most frequent tokens are {_percent(total)} of all:"
        for token in split.most_frequent:
            text = "" if token.text is None else f"  {token.text!r}"
            yield f"  {_percent(token.share):>8}  {token.id:>7}{text}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
