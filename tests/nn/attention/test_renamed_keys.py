"""Config keys that were renamed: the old key is read with a warning, and bounds are refused by their new path."""

from typing import Any

import pytest

from tests.families import each
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.attention.moba import Moba
from xscale.nn.attention.nsa import Nsa
from xscale.nn.attention.reformer import Reformer
from xscale.nn.mixer.attention import Attention
from xscale.nn.pattern.pattern import PATTERNS


@each(entry for family in (CORES, PATTERNS) for entry in family if entry.part.Config.renamed)
def test_every_old_key_stands_for_its_new_one(entry: Entry[Any]) -> None:
    schema = entry.part.Config
    for old, new in schema.renamed.items():
        assert old not in schema.model_fields
        data = encode(schema())
        del data["kind"]
        data[old] = data.pop(new)
        with pytest.warns(RenamedWarning):
            assert decode(schema, data) == schema()


def test_a_recipe_with_old_keys_is_read() -> None:
    old = {"kind": "nsa", "run": 8, "stride": 4, "block": 16, "top": 4, "window": 24}
    with pytest.warns(RenamedWarning, match="core.top is now called core.top_blocks"):
        core = decode(Attention.Config, {"core": old}).core
    assert core == Nsa.Config(compression_block=8, compression_stride=4, selection_block=16, top_blocks=4, window=24)


@pytest.mark.parametrize(
    ("core", "path"),
    [
        ({"kind": "moba", "top_k": 0}, "core.top_k"),
        ({"kind": "nsa", "top_blocks": 2}, "core.top_blocks"),
        ({"kind": "reformer", "buckets": 3}, "core.buckets"),
        ({"kind": "routing_transformer", "decay": 1.0}, "core.decay"),
        ({"kind": "fmmformer", "feature_maps": 4}, "core.feature_maps"),
        ({"kind": "block_sparse", "soft_cap": 0.0}, "core.soft_cap"),
    ],
)
def test_values_out_of_bounds_are_refused_by_their_path(core: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(Attention.Config, {"core": core})
    assert [problem.path for problem in error.value.problems] == [path]


def test_values_at_the_bounds_are_taken() -> None:
    assert decode(Attention.Config, {"core": {"kind": "moba", "top_k": 1}}).core == Moba.Config(top_k=1)
    assert decode(Attention.Config, {"core": {"kind": "reformer", "buckets": 2}}).core == Reformer.Config(buckets=2)
