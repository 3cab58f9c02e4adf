"""configs/recipe.schema.json is what the code says, and every config of a run in configs/ fits it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.fits import fits
from xscale.commands.json_schema import text
from xscale.core.yaml_reader import parse

ROOT = Path(__file__).parents[2]
# A comparison is no part of a run: tests/commands/test_compare.py reads those.
CONFIGS = sorted(file for file in (ROOT / "configs").rglob("*.y*ml") if file.parent.name not in ("compare", "ladder"))


@pytest.fixture(scope="module")
def written() -> str:
    """The text of the schema, which takes seconds to make."""
    return text()


@pytest.fixture(scope="module")
def schema(written: str) -> Any:
    return json.loads(written)


def test_the_file_is_up_to_date(written: str) -> None:
    kept = (ROOT / "configs/recipe.schema.json").read_text(encoding="utf-8")
    assert kept == written, "renew it: python -m xscale.commands.json_schema --write"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_fits(path: Path, schema: Any) -> None:
    assert fits(parse(path.read_text(encoding="utf-8"), str(path)), schema)


def test_a_misspelt_key_does_not_fit(schema: Any) -> None:
    assert not fits({"train": {"step": 3}}, schema)
    assert not fits({"model": {"kind": "decoder", "stack": {"depht": 3}}}, schema)
    assert fits({"model": {"kind": "decoder", "stack": {"depth": 3}}}, schema)
