"""Section `parallel` of a recipe: bounds, and keys under their old names."""

from typing import Any

import pytest

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"pipeline": {"chunks": 3}}, {"pipeline": {"stages_per_rank": 3}}),
        ({"pipeline": {"stages_by_hand": [1, 3]}}, {"pipeline": {"blocks_per_stage": [1, 3]}}),
        ({"recompute": {"gathered": True}}, {"recompute": {"regather_sequence_parallel_input": True}}),
        ({"recompute": {"keep": "input"}}, {"recompute": {"granularity": "full"}}),
        ({"recompute": {"keep": "products"}}, {"recompute": {"granularity": "selective"}}),
    ],
)
def test_an_old_key_is_read_under_its_new_name(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.warns(RenamedWarning, match="is now called"):
        read = decode(ParallelConfig, old)
    assert read == decode(ParallelConfig, new)
    assert decode(ParallelConfig, encode(read)) == read


@pytest.mark.parametrize(
    ("section", "key"),
    [("zero", "prefetch"), ("recompute", "every"), ("pipeline", "stages_per_rank")],
)
def test_a_negative_number_is_refused(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{section}.{key}: must be >= "):
        decode(ParallelConfig, {section: {key: -1}})
