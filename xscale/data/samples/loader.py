"""The corpus of a run and its loaders: samples by number, so that their state is the count of consumed samples."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.open_blend import open_blend
from xscale.data.corpus.prepared import PreparedData, open_prepared
from xscale.data.samples.blend import BlendedDataset, mixing_rates
from xscale.data.samples.labelled import LabelledDataset
from xscale.data.samples.packed import PackedDataset
from xscale.data.samples.pairs import PairDataset, require_room_behind_prefix
from xscale.data.samples.sentences import SentenceDataset
from xscale.data.samples.streams import StreamDataset
from xscale.data.source.source import Labels
from xscale.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Samples:
    """B samples of T + 1 tokens, of which the last T are the targets of the first T; or of pairs, with S tokens of the
    source before T of the target; or of texts for objectives on sentences (`SentenceDataset`); or of labelled examples
    of T tokens."""

    tokens: Tensor
    """[B, T+1], [B, S+T] or [B, T] int64."""
    documents: Tensor
    """Documents of the tokens, in their shape: 0, 1, 2, ... within each sample; an end-of-document token belongs to the
    document it ends. In pairs and labelled examples 0 is text, and 1 padding."""
    index: Tensor
    """[B] int64: the number of each sample in the run."""
    draw_numbers: Tensor
    """[B] int64: the number by which what an objective draws for each sample is seeded; that of static masking
    (`data.dupe_factor`) comes again."""
    begins: Tensor | None = None
    """[B], whether each segment of a stream continues no earlier one; None: samples are no segments of streams."""
    labels: Tensor | None = None
    """Labels of examples: classes [B, 1] (int64), scores [B, 1] (float64) or tags [B, T] (int64, -100: none)."""

    def __len__(self) -> int:
        return self.tokens.shape[0]


class SampleDataset(Protocol):
    """A dataset with random access: `PackedDataset`, `PairDataset`, `SentenceDataset`, `LabelledDataset` or
    `BlendedDataset`."""

    def sample(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return the tokens and documents of a sample, and then its labels if it has any."""

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in a sample is drawn."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class FullSamples:
    """Samples without padding and of one token, where there is no data yet: what a plan simulates."""

    config: DataConfig
    kind: Literal["packed", "pairs", "sentences", "labels"]
    labels: str | None
    """Kind of the labels: class, score or tags; None: the samples have none."""
    token: int
    document: int
    """Tokens of a document in packed text."""

    def sample(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return the tokens and documents of a sample, and then its labels if it has any."""
        if self.labels is not None:
            return LabelledDataset.full_sample(self.config, self.token, self.labels)
        if self.kind == "pairs":
            return PairDataset.full_sample(self.config, self.token)
        if self.kind == "sentences":
            return SentenceDataset.full_sample(self.config, self.token)
        return PackedDataset.full_sample(self.config.sequence_length, self.token, self.document)

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in a sample is drawn: its own."""
        return index

    def __len__(self) -> int:
        return 1


class Loader:
    """Random access to the samples of a run; it has no position, so that every layout of ranks reads the same data."""

    def __init__(self, data: SampleDataset, *, vocabulary: int | None = None) -> None:
        """With `vocabulary`, a token outside [0, vocabulary) raises ConfigError instead of a crash in the embedding."""
        self.data = data
        self.vocabulary = vocabulary

    def samples(self, first: int, count: int) -> Samples:
        """Return the samples [first, first + count) of the run; ConfigError when a token is out of range."""
        assert count > 0, "a batch of no samples"
        return self.drawn(range(first, first + count))

    def drawn(self, numbers: Sequence[int]) -> Samples:
        """Return the samples of these numbers of the run, in their order; ConfigError when a token is out of range."""
        drawn = [self.data.sample(number) for number in numbers]
        index = np.array(numbers, dtype=np.int64)
        tokens, documents, *labels = (np.stack(arrays) for arrays in zip(*drawn, strict=True))
        if self.vocabulary is not None and (tokens.max() >= self.vocabulary or tokens.min() < 0):
            what = f"the data contains token {tokens.max()}, but the tokenizer's vocabulary is {self.vocabulary}"
            raise ConfigError(
                "data.tokenizer", what, "Use the tokenizer with which the data was written."
            )
        return Samples(
            tokens=torch.from_numpy(tokens),
            documents=torch.from_numpy(documents),
            index=torch.from_numpy(index),
            draw_numbers=torch.tensor([self.data.draw_number(number) for number in numbers]),
            begins=torch.from_numpy(self.data.begins(index))
            if isinstance(self.data, StreamDataset)
            else None,
            labels=torch.from_numpy(labels[0]) if labels else None,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes or tags of labelled examples, by number; none of other samples, and of scores."""
        return self.data.labels.names if isinstance(self.data, LabelledDataset) else ()

    def stream(self, requests: Iterable[tuple[int, int]], *, ahead: int = 2) -> Iterator[Samples]:
        """Yield `samples(*request)` for each request; a thread prefetches `ahead` of them."""
        if ahead < 1:
            for first, count in requests:
                yield self.samples(first, count)
            return
        ready: queue.Queue[Samples | BaseException | None] = queue.Queue(maxsize=ahead)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._read, args=(requests, ready, stop), name="loader", daemon=True
        )
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    def _read(
        self,
        requests: Iterable[tuple[int, int]],
        ready: "queue.Queue[Samples | BaseException | None]",
        stop: threading.Event,
    ) -> None:
        def put(item: Samples | BaseException | None) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        try:
            for first, count in requests:
                if not put(self.samples(first, count)):
                    return
        except BaseException as error:
            put(error)
            return
        put(None)


@dataclass(frozen=True)
class Corpus:
    """Tokenizer and loaders for a training loop."""

    tokenizer: Tokenizer
    train: Loader
    validation: Loader | None
    """In the order of the text; None when the config has no validation split."""
    sets: tuple[PreparedData, ...]
    """The prepared datasets: one, or those of a blend."""

    @property
    def pairs(self) -> bool:
        """Whether the documents are pairs of a source and a target."""
        return self.sets[0].pairs

    @property
    def records(self) -> Literal["text", "pairs", "labels"]:
        """Content of the documents, as the trait of sources."""
        return self.sets[0].records

    @property
    def labels(self) -> Labels | None:
        """The labels of labelled examples; None: there are none."""
        return self.sets[0].labels

    @property
    def pair_datasets(self) -> list[PairDataset]:
        """The datasets of pairs for training; none without pairs."""
        return [dataset for dataset in self._training_datasets if isinstance(dataset, PairDataset)]

    @property
    def sentence_datasets(self) -> list[SentenceDataset]:
        """The datasets for training objectives on pairs of sentences; none without."""
        return [
            dataset for dataset in self._training_datasets if isinstance(dataset, SentenceDataset)
        ]

    @property
    def _training_datasets(self) -> Sequence[SampleDataset]:
        data = self.train.data
        return data.datasets if isinstance(data, BlendedDataset) else [data]


def open_corpus(config: DataConfig, *, seed: int, streams: int | None = None) -> Corpus:
    """Open prepared data, read only; any number of processes may. ConfigError when it is missing or does not match.

    `streams`: rows of a batch of a run whose order is that of streams; None: training samples are in another order.
    """
    sets = open_blend(config) if config.blend else [(open_prepared(config), 1.0)]
    tokenizer = sets[0][0].tokenizer
    require_room_behind_prefix(config, [prepared for prepared, _ in sets])
    train = _dataset(config, sets, "train", seed)
    assert train is not None
    if streams is not None:
        assert isinstance(train, PackedDataset), "streams are of one packed text"
        train = StreamDataset(train, streams)
    validation = _dataset(config, sets, "validation", seed)
    return Corpus(
        tokenizer=tokenizer,
        train=Loader(train, vocabulary=tokenizer.vocabulary),
        validation=None
        if validation is None
        else Loader(validation, vocabulary=tokenizer.vocabulary),
        sets=tuple(prepared for prepared, _ in sets),
    )


def _dataset(
    config: DataConfig,
    sets: list[tuple[PreparedData, float]],
    part: Literal["train", "validation"],
    seed: int,
) -> SampleDataset | None:
    shuffle = config.order == "shuffled" and part == "train"
    if sets[0][0].labels is not None:
        return _labelled_dataset(config, sets[0][0], part, seed)
    datasets: list[PackedDataset | PairDataset | SentenceDataset] = []
    weights: list[float] = []
    for prepared, weight in sets:
        split = prepared.train if part == "train" else prepared.validation
        if split is not None:
            if prepared.pairs:
                datasets.append(
                    PairDataset(split, config, prepared.tokenizer.pad, seed=seed, shuffle=shuffle)
                )
            elif config.split_sentences:
                datasets.append(
                    SentenceDataset(split, config, prepared.tokenizer, seed=seed, shuffle=shuffle)
                )
            else:
                datasets.append(
                    PackedDataset(split, config.sequence_length, seed=seed, shuffle=shuffle)
                )
            datasets[-1].dupe_factor = config.dupe_factor
            weights.append(weight)
    if not datasets:
        return None
    if len(datasets) == 1:
        return datasets[0]
    rates = mixing_rates(config, weights, [len(dataset) for dataset in datasets])
    return BlendedDataset(datasets, rates)


def _labelled_dataset(
    config: DataConfig, prepared: PreparedData, part: Literal["train", "validation"], seed: int
) -> LabelledDataset | None:
    split = prepared.train if part == "train" else prepared.validation
    if split is None:
        return None
    assert split.labels is not None
    assert prepared.labels is not None
    shuffle = config.order == "shuffled" and part == "train"
    return LabelledDataset(
        split.indexed,
        split.labels,
        prepared.labels,
        config,
        prepared.tokenizer,
        seed=seed,
        shuffle=shuffle,
    )
