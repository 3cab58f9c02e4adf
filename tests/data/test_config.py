"""The `data:` section: defaults that work, strictness, and nothing heavy imported to read it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning, rename_old_keys
from xscale.data.config import DataConfig


def test_the_default_is_real_text_that_every_machine_has() -> None:
    config = DataConfig()
    assert (config.source.kind, config.tokenizer.kind) == ("stdlib", "sentencepiece")
    assert decode(DataConfig, encode(config)) == config
    schema = DataConfig.model_json_schema()
    assert all(field.get("description") for field in schema["properties"].values())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"squence_length": 8}, "squence_length: unknown key. Did you mean 'sequence_length'"),
        ({"sequence_length": 0}, "sequence_length: must be >"),
        ({"sequence_length": "8"}, "sequence_length: must be a valid integer"),
        ({"validation": 1.0}, "validation: must be "),
        ({"source": "sdtlib"}, "source: there is no source of kind 'sdtlib'. Did you mean 'stdlib'"),
        ({"source": {"kind": "text", "pahts": ["a"]}}, r"source\.pahts: unknown key. Did you mean 'paths'"),
        ({"tokenizer": {"kind": "sentencepiece", "vocabulary": 8}}, r"tokenizer\.vocabulary: .*300"),
        ({"source": {"kind": "byte"}}, "source: there is no source of kind 'byte'"),
    ],
)
def test_a_mistake_is_named_with_its_place(data: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        decode(DataConfig, data)


def test_reading_a_config_imports_nothing_heavy() -> None:
    code = "import sys, xscale.data.config; print([n for n in ('torch', 'numpy', 'sentencepiece') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("shuffle", "order"), [(True, "shuffled"), (False, "text")])
def test_the_old_key_of_the_order_is_read(shuffle: bool, order: str) -> None:
    with pytest.warns(RenamedWarning, match=f"shuffle is now order={order}"):
        assert rename_old_keys(DataConfig, {"shuffle": shuffle}, {}) == {"order": order}
    with pytest.warns(RenamedWarning):
        assert rename_old_keys(DataConfig, {"shuffle": shuffle, "order": order}, {}) == {"order": order}
    with pytest.raises(ConfigError, match="order"):
        rename_old_keys(DataConfig, {"shuffle": shuffle, "order": "streams"}, {})
