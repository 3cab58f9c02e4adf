"""Blending: shares hold from the first sample on, each set in its own order, nothing stored."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpora import text_config
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.data.config import BlendItem, DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.samples.blend import BlendedDataset, mixing_rates
from xscale.data.samples.loader import open_corpus
from xscale.data.samples.packed import PackedDataset
from xscale.data.tokenizer.byte import Byte


class Set:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> Any:
        return index


def blend(weights: list[float], lengths: list[int] | None = None) -> BlendedDataset:
    sets = [Set(length) for length in lengths or [100] * len(weights)]
    return BlendedDataset(cast(list[PackedDataset], sets), weights)


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), count=st.integers(1, 300))
def test_shares_hold_at_every_point_and_each_set_goes_on_in_order(weights: list[float], count: int) -> None:
    mix = blend(weights)
    given_out = [0] * len(weights)
    for index in range(count):
        number, own = mix.locate(index)
        assert own == given_out[number]
        given_out[number] += 1
        for weight, had in zip(weights, given_out, strict=True):
            assert abs(had - (index + 1) * weight / sum(weights)) < len(weights) + 1e-3


def test_an_index_far_out_is_found_at_once() -> None:
    number, own = blend([3, 1]).locate(4 * 10**15)
    assert (number, own) in {(0, 3 * 10**15), (1, 10**15)}


@pytest.mark.parametrize(("weights", "lengths"), [([1, 1], [100, 60]), ([3, 1], [100, 90]), ([5, 2, 1], [70, 90, 11])])
def test_an_epoch_ends_before_a_set_begins_again(weights: list[float], lengths: list[int]) -> None:
    mix = blend(weights, lengths)
    last = [
        max(own for number, own in map(mix.locate, range(len(mix))) if number == one) for one in range(len(weights))
    ]
    fullest = min(length / weight for length, weight in zip(lengths, weights, strict=True))
    assert all(own <= length for own, length in zip(last, lengths, strict=True))
    assert len(mix) == math.floor(fullest * sum(weights))


def test_prepared_sets_are_blended_from_a_config(tmp_path: Path) -> None:
    configs = [text_config(tmp_path / name, count=count) for name, count in (("a", 60), ("b", 90))]
    ready = [prepare(config, processes=1, progress=False) for config in configs]
    data = {"tokenizer": "byte", "sequence_length": 32, "blend": [{"prepared": str(ready[0].path), "weight": 3}]}
    data["blend"] = [*cast(list[Any], data["blend"]), {"prepared": str(ready[1].path / "train")}]
    config = decode(DataConfig, data)
    assert decode(DataConfig, encode(config)) == config
    assert prepare(config).path == ready[0].path
    corpus = open_corpus(config, seed=1)
    assert len(corpus.sets) == 2
    assert corpus.validation is not None
    mix = corpus.train.data
    assert isinstance(mix, BlendedDataset)
    alone = open_corpus(configs[0], seed=1).train.samples(0, 6)
    mine = [index for index in range(8) if mix.locate(index)[0] == 0]
    assert len(mine) == 6
    assert corpus.train.samples(0, 8).tokens[mine].equal(alone.tokens)


def test_sets_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    one = prepare(text_config(tmp_path / "a"), processes=1, progress=False)
    other = prepare(text_config(tmp_path / "b", tokenizer=Byte.Config(sentinels=1)), processes=1, progress=False)
    parts = tuple(BlendItem(prepared=str(ready.path)) for ready in (one, other))
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_corpus(DataConfig(tokenizer=Byte.Config(), blend=parts), seed=0)


def test_a_blend_and_a_prepared_set_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        decode(DataConfig, {"prepared": "a", "blend": [{"prepared": "b"}]})
    with pytest.raises(ConfigError, match=r"blend\.0\.weight: must be > 0"):
        decode(DataConfig, {"blend": [{"prepared": "b", "weight": 0.0}]})


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_rates_by_samples_are_those_of_t5(temperature: float) -> None:
    """r_m = min(e_m, K) / sum min(e_n, K), then to the power of 1 / T and divided by their sum again."""
    samples, limit = [100, 5000, 90000], 10000
    config = decode(
        DataConfig,
        {
            "blend": [{"prepared": name} for name in "abc"],
            "blend_rates": "samples",
            "blend_limit": limit,
            "blend_temperature": temperature,
        },
    )
    rates = mixing_rates(config, [1.0, 1.0, 1.0], samples)
    proportional = [min(count, limit) / 15100 for count in samples]
    scaled = [rate ** (1 / temperature) for rate in proportional]
    assert rates == pytest.approx([rate / sum(scaled) for rate in scaled])
    unlimited = config.model_copy(update={"blend_limit": None, "blend_temperature": 1.0})
    assert mixing_rates(unlimited, [1.0, 2.0, 1.0], samples) == pytest.approx(
        [100 / 100100, 1e4 / 100100, 9e4 / 100100]
    )
    assert mixing_rates(DataConfig(), [3.0, 1.0], [5, 7]) == [3.0, 1.0]


def test_rates_without_a_blend_are_refused() -> None:
    with pytest.raises(ConfigError, match="are of a blend; name its datasets"):
        decode(DataConfig, {"blend_temperature": 2.0})
    with pytest.raises(ConfigError, match="`blend_limit` limits rates by samples"):
        decode(DataConfig, {"blend": [{"prepared": "a"}], "blend_limit": 5})
