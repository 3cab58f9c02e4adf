"""The keys of blocks before there was a family of residual streams: `placement`, and `residual` as a word."""

import warnings
from typing import Any

import pytest

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.nn.blocks.block import BlockConfig

NEXT = "the old name will be refused in the next version"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "placement": ({"placement": "post"}, {"kind": "post"}, [f"placement is now residual=post; {NEXT}"]),
    "both as they were saved": (
        {"placement": "pre", "residual": "sequential"},
        {"kind": "pre"},
        [f"placement is now residual=pre; {NEXT}"],
    ),
    "reversible, with its norms": (
        {"placement": "sandwich", "residual": "reversible"},
        {"kind": "reversible", "placement": "sandwich"},
        [f"placement is now residual={{kind: reversible, placement: sandwich}}; {NEXT}"],
    ),
    "parallel, with its norms": (
        {"placement": "res_post", "residual": "parallel"},
        {"kind": "parallel", "placement": "res_post"},
        [f"placement is now residual={{kind: parallel, placement: res_post}}; {NEXT}"],
    ),
    "sequential": (
        {"residual": "sequential"},
        {"kind": "pre"},
        [f"residual: the residual 'sequential' is now called 'pre'; {NEXT}"],
    ),
    "the word that stayed": ({"residual": "parallel"}, {"kind": "parallel", "placement": "pre"}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_old_keys_are_read_with_the_new_one(name: str) -> None:
    old, new, says = CASES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RenamedWarning)
        config = decode(BlockConfig, old)
    assert encode(config.residual) == new
    assert [str(warning.message) for warning in caught] == says


@pytest.mark.parametrize(
    ("later", "kind"), [(("residual", "placement"), "post"), (("placement", "residual"), "pre")], ids=["old", "new"]
)
def test_of_two_that_contradict_the_later_counts(later: tuple[str, str], kind: str) -> None:
    origin = {later[0]: "recipe.yaml", later[1]: "command line"}
    config = decode(BlockConfig, {"placement": "post", "residual": "pre"}, origin)
    assert config.residual.kind == kind


def test_both_in_one_file_are_refused() -> None:
    origin = {"placement": "recipe.yaml", "residual": "recipe.yaml"}
    with pytest.raises(ConfigError, match="Give only residual"):
        decode(BlockConfig, {"placement": "post", "residual": "pre"}, origin)
