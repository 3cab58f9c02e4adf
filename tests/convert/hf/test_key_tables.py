"""Tables of keys that have the same value in config.json and in xscale: one table for both directions."""

from typing import Any

import pytest

from xscale.convert.hf import deberta, xlnet
from xscale.convert.hf.keys import keys_from_hf, keys_to_hf
from xscale.convert.hf.registry import model_of

TABLES = {"deberta": deberta.KEYS, "xlnet": xlnet.KEYS}
VALUES: dict[str, Any] = {"width": 48, "depth": 3, "heads": 6, "eps": 3e-4, "init_std": 0.03, "dropout": 0.25}
"""Last part of a key of xscale -> a value that is not its default; truth values are true."""
BLOCK = {
    "mixer": {"kind": "attention"},
    "ffn": {"kind": "dense", "bias": True},
    "norm": {"kind": "layer"},
}


@pytest.mark.parametrize("name", TABLES)
def test_every_key_goes_both_ways(name: str) -> None:
    table = TABLES[name]
    data = {key: VALUES.get(path.split(".")[-1], True) for key, path in table.items()}
    section = keys_from_hf(table, data, {"kind": "decoder", "stack": {"block": BLOCK}})
    assert keys_to_hf(table, model_of(section)) == data
    assert "heads" not in BLOCK["mixer"]


def test_a_dropout_of_an_integer_is_read() -> None:
    section = keys_from_hf({"attn_pdrop": "stack.block.mixer.dropout"}, {"attn_pdrop": 0}, {})
    assert section == {"stack": {"block": {"mixer": {"dropout": 0.0}}}}
    assert isinstance(section["stack"]["block"]["mixer"]["dropout"], float)
