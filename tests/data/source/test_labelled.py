"""Labelled examples in groups: all of a group are in one split, and data without groups is what it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.corpus.prepared import open_prepared
from xscale.data.source.labelled import Labelled
from xscale.data.source.source import document_hash, validation_below

ROWS = [
    {"text": f"text {number} in form {form}", "label": "no", "original": f"text {number} in form 0"}
    for number in range(40)
    for form in range(3)
]


def config(folder: Path, **source: Any) -> DataConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"kind": "labelled", "paths": str(folder / "rows.jsonl"), "classes": ["no", "yes"], **source}
    section = {"source": data, "tokenizer": "byte", "folder": str(folder / "data"), "validation": 0.3, "workers": 1}
    return decode(DataConfig, section)


def validation_texts(data: DataConfig) -> list[str]:
    prepare(data, progress=False)
    prepared = open_prepared(data)
    split = prepared.validation
    assert split is not None
    return [
        prepared.tokenizer.decode(split.indexed.document(split.first + row).tolist()) for row in range(split.documents)
    ]


def test_a_group_is_in_the_split_of_its_text(tmp_path: Path) -> None:
    below = validation_below(0.3)
    held_out = [row["text"] for row in ROWS if document_hash(row["original"]) < below]
    assert 0 < len(held_out) < len(ROWS)
    assert validation_texts(config(tmp_path, group_field="original")) == held_out
    alone = [row["text"] for row in ROWS if document_hash(row["text"]) < below]
    assert validation_texts(config(tmp_path)) == alone
    assert alone != held_out


def test_prepared_data_without_groups_keeps_its_folder(tmp_path: Path) -> None:
    plain, grouped = (Labelled(config(tmp_path, group_field=name).source).identity() for name in (None, "original"))
    assert "group_field" not in plain
    assert grouped == {**plain, "group_field": "original"}


def test_the_group_is_a_text(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "no", "original": "b"}, {"text": "a", "label": "no"}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Labelled(
        Labelled.Config(paths=(str(tmp_path / "bad.jsonl"),), classes=("no", "yes"), group_field="original")
    )
    with pytest.raises(ConfigError, match=r"bad.jsonl:2: the record has no field 'original'.*data.source.group_field"):
        list(source.documents())
    with pytest.raises(ConfigError, match="two of the fields are both 'text'"):
        decode(Labelled.Config, {"group_field": "text"})
