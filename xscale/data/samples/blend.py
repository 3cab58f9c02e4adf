"""Blending: several datasets mixed by weight, as a pure function of the sample's index."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.samples.packed import PackedDataset
from xscale.data.samples.pairs import PairDataset
from xscale.data.samples.sentences import SentenceDataset


class BlendedDataset:
    """Datasets mixed by weight; each is read in order.

    Of any first n samples, a dataset gives the fraction of its weight, up to as many samples as there are datasets.
    Dataset 0 takes sample i when floor((i + 1) w) > floor(i w); the remaining samples are divided among the others in
    the same way. The arithmetic is exact, so that nothing drifts and nothing is stored.
    """

    def __init__(
        self, sets: Sequence[PackedDataset | PairDataset | SentenceDataset], weights: list[float]
    ) -> None:
        assert len(sets) == len(weights) > 0, "one weight per dataset"
        self.datasets = sets
        exact = [Fraction(weight).limit_denominator(1 << 20) for weight in weights]
        if any(weight <= 0 for weight in exact):
            raise ConfigError(
                "data.blend", "weights must be above one in a million", "Leave that dataset out."
            )
        left = sum(exact)
        self.fractions_of_rest: list[Fraction] = []
        for weight in exact:
            self.fractions_of_rest.append(weight / left)
            left -= weight

    def __len__(self) -> int:
        """Length of an epoch: the samples before any dataset starts again."""
        total = sum((fraction for _, fraction in self._fractions()), start=Fraction())
        return int(
            min(
                len(dataset) / (fraction / total)
                for dataset, (_, fraction) in zip(self.datasets, self._fractions(), strict=True)
            )
        )

    def _fractions(self) -> list[tuple[int, Fraction]]:
        result, left = [], Fraction(1)
        for number, fraction in enumerate(self.fractions_of_rest):
            result.append((number, left * fraction))
            left *= 1 - fraction
        return result

    def shares(self) -> list[float]:
        """Return the share of the samples that each dataset gives."""
        return [float(fraction) for _, fraction in self._fractions()]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in that dataset) of the run's sample `index`."""
        for number, fraction in enumerate(self.fractions_of_rest):
            before = index * fraction.numerator // fraction.denominator
            if (index + 1) * fraction.numerator // fraction.denominator > before:
                return number, before
            index -= before
        raise AssertionError("the last fraction is one")

    def drawn(self, samples: int) -> list[int]:
        """Count how many of the run's first `samples` are of each dataset."""
        counts = []
        for fraction in self.fractions_of_rest:
            counts.append(samples * fraction.numerator // fraction.denominator)
            samples -= counts[-1]
        return counts

    def draw_number(self, index: int) -> int:
        """Return the number by which what is random in the run's sample `index` is drawn: see `ShuffledDataset`."""
        if self.datasets[0].dupe_factor is None:
            return index
        number, within = self.locate(index)
        # No two texts of the blend have the same.
        return self.datasets[number].draw_number(within) * len(self.datasets) + number

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens, documents) of the run's sample `index`, as the dataset does that it is from."""
        number, within = self.locate(index)
        return self.datasets[number].sample(within)


def mixing_rates(
    config: DataConfig, weights: Sequence[float], samples: Sequence[int]
) -> list[float]:
    """Return the rate of each dataset, up to a common factor (Raffel et al. 2020, section 3.5.2).

    It is weight^(1 / T), or by samples (weight * min(samples, K))^(1 / T).
    """
    rates = list(weights)
    if config.blend_rates == "samples":
        limit = max(samples) if config.blend_limit is None else config.blend_limit
        rates = [weight * min(count, limit) for weight, count in zip(weights, samples, strict=True)]
    if config.blend_temperature != 1:
        largest = max(rates)
        rates = [(rate / largest) ** (1 / config.blend_temperature) for rate in rates]
    return [rate / sum(rates) for rate in rates] if config.blend_rates == "samples" else rates
