"""Static masking (Devlin et al. 2019; Liu et al. 2019, section 4.1): each text comes in so many versions, made once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.corpora import text_config
from tests.data.test_sentences import config as sentence_config
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.samples.blend import BlendedDataset
from xscale.data.samples.loader import Loader, open_corpus
from xscale.objective.objective import OBJECTIVES, Objective, SpecialTokens

SPECIALS = SpecialTokens(300, pad=0, eos=256, mask=257, sentinels=range(258, 260), bos=258)
KINDS = ["masked", "masked_sentences"]


def opened(folder: Path, kind: str, **fields: Any) -> tuple[Loader, Objective]:
    given = sentence_config(folder, **fields) if kind == "masked_sentences" else text_config(folder, **fields)
    prepare(given)
    objective = OBJECTIVES.build(OBJECTIVES.get(kind).part.Config(), SPECIALS, given.sequence_length, 3)
    return open_corpus(given, seed=5).train, objective


def versions(loader: Loader, objective: Objective, epochs: int) -> list[Counter[str]]:
    """How often each version of each text comes in that many epochs, as inputs and targets."""
    length = len(loader.data)
    seen: dict[int, Counter[str]] = {}
    for number in range(epochs * length):
        samples = loader.samples(number, 1)
        batch = objective.batch(samples.tokens, samples.documents, samples.draw_numbers)
        (place,) = loader.data.positions(samples.index.numpy()).tolist()  # type: ignore[attr-defined]
        seen.setdefault(place, Counter())[str((batch.tokens.ids.tolist(), batch.targets.tolist()))] += 1
    return list(seen.values())


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_comes_in_so_many_versions_equally_often(kind: str, tmp_path: Path) -> None:
    loader, objective = opened(tmp_path, kind, dupe_factor=2)
    counts = versions(loader, objective, 4)
    assert len(counts) == len(loader.data) > 3
    assert all(sorted(count.values()) == [2, 2] for count in counts)


@pytest.mark.parametrize("kind", KINDS)
def test_otherwise_every_epoch_has_a_version_of_its_own(kind: str, tmp_path: Path) -> None:
    loader, objective = opened(tmp_path, kind)
    assert all(sorted(count.values()) == [1, 1, 1] for count in versions(loader, objective, 3))


def test_texts_of_a_blend_have_numbers_of_their_own(tmp_path: Path) -> None:
    first, _ = opened(tmp_path / "a", "masked", dupe_factor=1)
    second, _ = opened(tmp_path / "b", "masked", dupe_factor=1)
    blend = BlendedDataset([first.data, second.data], [1.0, 2.0])  # type: ignore[list-item]
    texts = [blend.locate(index) for index in range(3 * len(blend))]
    places = [
        (number, int(blend.datasets[number].positions(torch.tensor([within]).numpy())[0])) for number, within in texts
    ]
    numbers = [blend.draw_number(index) for index in range(len(texts))]
    pairs = set(zip(places, numbers, strict=True))
    assert len(pairs) == len(set(places)) == len(set(numbers)), "a text has one number, and a number one text"


def test_no_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="dupe_factor"):
        decode(DataConfig, {"dupe_factor": 0})
