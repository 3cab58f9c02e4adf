"""`xscale.train(recipe, data=...)`: samples of the caller, by number or by an iterable, whole or resumed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xscale
from tests.distributed import Pool
from tests.train.test_loss_scale import DENSE
from tests.train.tiny import recipe
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.data.samples.caller_samples import CallerSamples
from xscale.recipe import Recipe

LENGTH = 32


class Numbered:
    """Sample i by its number."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        assert index < self.count
        return np.random.default_rng(index).integers(10, 200, LENGTH + 1).tolist()  # type: ignore[no-any-return]


class Streamed:
    """The same, one after another, each time that it is begun."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        samples = Numbered()
        for index in range(len(samples)):
            yield np.array(samples[index]), np.zeros(LENGTH + 1, dtype=np.int32)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def run(folder: Path, name: str, **train: Any) -> Recipe:
    return recipe(folder, name, train={"steps": 6, "batch_size": 8, "micro_batch_size": 4, "eval_every": 3, **train})


@pytest.mark.long
def test_samples_by_number_in_a_stream_and_resumed_are_one_run(tmp_path: Path) -> None:
    assert xscale.train(run(tmp_path, "numbered"), data=Numbered()) == 0
    wanted = losses(tmp_path / "numbered")
    assert len(wanted) == 6
    assert xscale.train(recipe(tmp_path, "text")) == 0
    assert losses(tmp_path / "text") != wanted, "negative control: the recipe's own data"
    for name, data in (("streamed", Streamed()), ("generator", None)):
        for stop in (2, None):
            samples: Iterable[Any] = iter(Streamed()) if data is None else data
            xscale.train(run(tmp_path, name, stop_after=stop), data=samples)
        assert losses(tmp_path / name) == wanted


def on_a_layout(folder: Path, name: str, samples: type, stop_after: int | None, parallel: dict[str, Any]) -> int:
    """Train in float64, in which layouts differ by rounding alone."""
    train = {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "eval_every": 0, "stop_after": stop_after}
    precision = {"compute": "float64", "master": "float64"}
    return xscale.train(
        recipe(folder, name, model=DENSE, train=train, parallel=parallel, precision=precision), data=samples()
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp_shard": 2}},
    "tp2": {"mesh": {"tp": 2}},
    "cp2": {"mesh": {"cp": 2}},
    "pp2": {"mesh": {"pp": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [("dp2", "tp2"), *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("pp2", "dp2"), ("dp2", "cp2")))],
)
def test_ranks_read_their_own_samples_and_resume_on_another_layout(
    before: str, after: str, tmp_path: Path, pool: Pool
) -> None:
    """Samples by number before the stop, the same in a stream after it: the losses are those of one process."""
    assert on_a_layout(tmp_path, "one", Numbered, None, {}) == EXIT_DONE
    wanted = losses(tmp_path / "one")
    stopped = pool.run(on_a_layout, 2, tmp_path, "moved", Numbered, 3, LAYOUTS[before])
    assert stopped == [EXIT_REQUEUE] * 2
    assert pool.run(on_a_layout, 2, tmp_path, "moved", Streamed, None, LAYOUTS[after]) == [EXIT_DONE] * 2
    assert losses(tmp_path / "moved") == pytest.approx(wanted, rel=1e-9)
    assert len(wanted) == 6


def test_a_run_on_samples_resumes_with_samples_alone(tmp_path: Path) -> None:
    assert xscale.train(run(tmp_path, "run", stop_after=2), data=Numbered()) == 75
    with pytest.raises(ConfigError, match=r"data\.from_caller"):
        xscale.train(run(tmp_path, "run"))


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        ([[1] * (LENGTH + 1)] * 7, "there are 7 samples, and the run takes 8"),
        (iter([[1] * (LENGTH + 1)] * 3), "there are 3 samples, and the run takes 8"),
        (iter([[1] * LENGTH] * 8), "sample 0 has the shape [32]. data.sequence_length=32 takes 33 token ids"),
        (iter([[0.5] * (LENGTH + 1)] * 8), "sample 0 has numbers of type float64"),
        (iter(["text"] * 8), "sample 0 has the shape []"),
        (iter([()] * 8), "sample 0 has the shape of nothing"),
        (lambda: None, "a function has no samples that could be read"),
    ],
    ids=["too few", "a stream ends", "too short", "no integers", "texts", "an empty tuple", "a function"],
)
def test_samples_of_another_form_are_a_sentence(samples: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        list(map(CallerSamples(samples, LENGTH, 8).sample, range(8)))
    assert sentence in str(refused.value)


def test_a_stream_that_can_be_begun_again_goes_back_and_a_generator_says_that_it_cannot() -> None:
    dataset = CallerSamples(Streamed(), LENGTH, 8)
    first, *_ = dataset.sample(1)
    assert not np.array_equal(dataset.sample(5)[0], first)
    assert np.array_equal(dataset.sample(1)[0], first)
    used = CallerSamples(iter(Streamed()), LENGTH, 8)
    used.sample(5)
    with pytest.raises(ConfigError, match="a generator is used up"):
        used.sample(1)
