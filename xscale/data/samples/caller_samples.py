"""Training samples of the caller of `xscale.train`: by number, or in an order that stays."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError

PATH = "data"
CONTRACT = (
    "Give samples by number (`__getitem__` and `__len__`), or an iterable that yields the same samples each time "
    "that it is begun."
)


class CallerSamples:
    """A dataset of samples that the caller gives.

    Sample i of the run is `samples[i]`, or what the iterable yields after i others, however many ranks there are: each
    reads those of its micro-batches. A run that resumes after n samples reads on at sample n; an iterable is begun anew
    and its first n samples are passed over.
    """

    def __init__(self, samples: Sequence[Any] | Iterable[Any], length: int, needed: int) -> None:
        """`length`: tokens of a sample without the last target. `needed`: samples of the run. ConfigError where there
        are fewer."""
        self.length = length
        self.needed = needed
        self._samples = samples
        self._numbered = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
        if not self._numbered and not hasattr(samples, "__iter__"):
            what = f"a {type(samples).__name__} has no samples that could be read"
            raise ConfigError(PATH, what, CONTRACT)
        if self._numbered and len(samples) < needed:  # type: ignore[arg-type]
            raise self._too_few(len(samples))  # type: ignore[arg-type]
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def sample(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return the tokens [T+1] and documents [T+1] of a sample; ConfigError where it is not of that form."""
        value = self._samples[index] if self._numbered else self._yielded(index)  # type: ignore[index]
        pair = value if isinstance(value, tuple) else (value,)
        arrays = [np.asarray(array) for array in pair]
        shapes = [list(array.shape) for array in arrays]
        if len(arrays) not in (1, 2) or any(shape != [self.length + 1] for shape in shapes):
            what = f"sample {index} has the shape {' and '.join(map(str, shapes)) or 'of nothing'}"
            fix = f"data.sequence_length={self.length} takes {self.length + 1} token ids; a tuple adds their documents."
            raise ConfigError(PATH, what, fix)
        if not all(np.issubdtype(array.dtype, np.integer) for array in arrays):
            what = f"sample {index} has numbers of type {arrays[0].dtype}"
            raise ConfigError(PATH, what, "Give token ids, which are integers.")
        tokens = arrays[0].astype(np.int64)
        documents = arrays[1].astype(np.int64) if len(arrays) == 2 else np.zeros_like(tokens)
        return tokens, documents

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in a sample is drawn: its own."""
        return index

    def __len__(self) -> int:
        return len(self._samples) if self._numbered else self.needed  # type: ignore[arg-type]

    def _yielded(self, index: int) -> Any:
        """The sample of that number of the iterable, which is begun anew for one before the last."""
        if self._iterator is None or index < self._next:
            if self._iterator is not None and iter(self._samples) is self._samples:
                what = (
                    f"sample {index} is read again, and a {type(self._samples).__name__} is used up"
                )
                raise ConfigError(PATH, what, CONTRACT)
            self._iterator, self._next = iter(self._samples), 0
        for value in self._iterator:
            self._next += 1
            if self._next > index:
                return value
        raise self._too_few(self._next)

    def _too_few(self, count: int) -> ConfigError:
        what = f"there are {count:,} samples, and the run takes {self.needed:,} (train.steps x train.batch_size)"
        return ConfigError(
            PATH, what, "Give more, such as the same in another order, or take fewer train.steps."
        )
