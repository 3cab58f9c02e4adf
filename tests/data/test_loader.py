"""The loader: any batch by the number of its first sample, on any layout; reading ahead changes nothing."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.data.corpora import text_config
from xscale.core.errors import ConfigError
from xscale.data.corpus.prepare import prepare
from xscale.data.samples.loader import Loader, open_corpus


class Counting:
    """Sample i is all i."""

    def draw_number(self, index: int) -> int:
        return index

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if index == 50:
            raise ConfigError("data", "sample 50 is broken")
        return np.full(5, index, dtype=np.int64), np.zeros(5, dtype=np.int64)

    def __len__(self) -> int:
        return 100


def test_a_batch_is_its_samples() -> None:
    batch = Loader(Counting()).samples(7, 3)
    assert len(batch) == 3
    assert batch.tokens.dtype == batch.documents.dtype == batch.index.dtype == torch.int64
    assert batch.tokens.shape == batch.documents.shape == (3, 5)
    assert batch.index.tolist() == batch.tokens[:, 0].tolist() == [7, 8, 9]


def test_ranks_and_micro_batches_share_one_order(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    prepare(config, processes=1, progress=False)
    one = open_corpus(config, seed=3).train.samples(40, 12)
    ranks = [open_corpus(config, seed=3).train for _ in range(3)]
    parts = [ranks[rank].samples(40 + 4 * rank + 2 * micro, 2) for rank in range(3) for micro in range(2)]
    assert torch.equal(one.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(one.documents, torch.cat([part.documents for part in parts]))
    assert not torch.equal(one.tokens, open_corpus(config, seed=4).train.samples(40, 12).tokens)


def test_validation_comes_in_the_order_of_the_text(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    ready = prepare(config, processes=1, progress=False)
    corpus = open_corpus(config, seed=3)
    assert corpus.validation is not None
    assert ready.validation is not None
    batch = corpus.validation.samples(0, len(corpus.validation.data))
    joined = torch.cat([batch.tokens[0, :1], batch.tokens[:, 1:].flatten()])
    assert joined.tolist() == ready.validation.tokens[: len(joined)].tolist()
    assert open_corpus(text_config(tmp_path, validation=0.2), seed=9).train.vocabulary == 384


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_reading_ahead_changes_nothing_and_its_thread_ends(ahead: int) -> None:
    loader = Loader(Counting())
    requests = [(0, 2), (10, 1), (4, 3)]
    before = threading.active_count()
    found = [batch.index.tolist() for batch in loader.stream(iter(requests), ahead=ahead)]
    assert found == [[0, 1], [10], [4, 5, 6]]
    stream = loader.stream(((index, 1) for index in range(10**9)), ahead=ahead)
    assert [next(stream).index.item() for _ in range(3)] == [0, 1, 2]
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_fault_comes_out_where_its_batch_is_wanted(ahead: int) -> None:
    stream = Loader(Counting()).stream([(48, 2), (50, 1), (51, 1)], ahead=ahead)
    assert next(stream).index.tolist() == [48, 49]
    with pytest.raises(ConfigError, match="sample 50 is broken"):
        next(stream)


def test_a_token_outside_the_vocabulary_is_the_users_fault() -> None:
    loader = Loader(Counting(), vocabulary=9)
    assert len(loader.samples(0, 9)) == 9
    with pytest.raises(ConfigError, match="the data contains token 9, but the tokenizer's vocabulary is 9"):
        loader.samples(0, 10)
