"""Batches by the number of their first sample: the loader's whole state is how many samples were consumed."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.samples import Samples


class Sampled(Protocol):
    """What a loader draws from: `Packed`, or a `Blend` of several."""

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

    def __len__(self) -> int: ...


class Loader:
    """Random access to a run's samples; holds no position, so any layout of ranks reads the same run."""

    def __init__(self, data: Sampled, *, vocabulary: int | None = None) -> None:
        """With `vocabulary`, a token outside [0, vocabulary) is a ConfigError and not a crash in the embedding."""
        self.data = data
        self.vocabulary = vocabulary

    def samples(self, first: int, count: int) -> Samples:
        """The run's samples [first, first + count)."""
        assert count > 0, "a batch of no samples"
        drawn = [self.data.sample(index) for index in range(first, first + count)]
        tokens = np.stack([tokens for tokens, _ in drawn])
        if self.vocabulary is not None and (tokens.max() >= self.vocabulary or tokens.min() < 0):
            what = f"the data holds token {tokens.max()}, but the tokenizer has {self.vocabulary}"
            raise ConfigError("data.tokenizer", what, "Give the tokenizer with which the data was written.")
        return Samples(
            tokens=torch.from_numpy(tokens),
            documents=torch.from_numpy(np.stack([documents for _, documents in drawn])),
            index=torch.arange(first, first + count),
        )

    def stream(self, requests: Iterable[tuple[int, int]], *, ahead: int = 2) -> Iterator[Samples]:
        """`samples(*request)` for each request, read `ahead` of need by a thread that ends with the iterator."""
        if ahead < 1:
            for first, count in requests:
                yield self.samples(first, count)
            return
        ready: queue.Queue[Samples | BaseException | None] = queue.Queue(maxsize=ahead)
        stop = threading.Event()
        thread = threading.Thread(target=self._read, args=(requests, ready, stop), name="loader", daemon=True)
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
