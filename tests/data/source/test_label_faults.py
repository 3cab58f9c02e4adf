"""Labelled examples in JSON lines, CSV and TSV: classes, scores and tags; a label at fault is named by its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import prepare
from xscale.data.source.labelled import Labelled


def source(path: Path, **settings: Any) -> Labelled:
    return Labelled(Labelled.Config(paths=(str(path),), **settings))


def test_the_formats_are_read_alike(tmp_path: Path) -> None:
    rows = [("good, and short", "positive"), ("käse", "negative")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x, "label": y, "id": 1}) + "\n" for x, y in rows))
    (tmp_path / "b.csv").write_text('label,text\npositive,"good, and short"\nnegative,käse\n', encoding="utf-8")
    (tmp_path / "c.tsv").write_text("text\tlabel\ngood, and short\tpositive\nkäse\tnegative\n", encoding="utf-8")
    read = [(document.text, document.label) for document in source(tmp_path).documents()]
    assert read == [("good, and short", 1), ("käse", 0)] * 3


def test_pairs_of_texts_scores_and_tags(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b,label\nrain,wet,3.5\n")
    (pair,) = source(file, text_field="a", pair_field="b", labels="score").documents()
    assert (pair.text, pair.second, pair.label) == ("rain", "wet", 3.5)
    file.write_text("text,label\nAda of Rome,I O I\n")
    (tags,) = source(file, labels="tags", classes=("O", "I")).documents()
    assert (tags.text, tags.label) == ("Ada of Rome", (1, 0, 1))


FAULTS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, "positiv", r'a\.jsonl:2: the label "positiv" is no class of data\.source\.classes. Did you mean .positive'),
    ({}, None, r"a\.jsonl:2: the label null is no class of data\.source\.classes. Known: negative, positive"),
    ({"labels": "score"}, "high", r'a\.jsonl:2: the label "high" is no score. Write a finite number'),
    ({"labels": "score"}, "nan", r'a\.jsonl:2: the label "nan" is no score'),
    ({"labels": "score"}, True, r"a\.jsonl:2: the label true is no score"),
    ({"labels": "tags"}, "negative", r"a\.jsonl:2: the field 'text' has 2 words, and there are 1 tags. Give each word"),
    ({"labels": "tags"}, "negative odd", r'a\.jsonl:2: the label "odd" is no class'),
]


@pytest.mark.parametrize(("settings", "label", "sentence"), FAULTS, ids=[case[2][12:40] for case in FAULTS])
def test_a_label_at_fault_is_named_or_skipped(
    tmp_path: Path, settings: dict[str, Any], label: Any, sentence: str
) -> None:
    good = {"class": "negative", "score": 1, "tags": "negative positive"}[settings.get("labels", "class")]
    rows = [{"text": "two words", "label": value} for value in (good, label, good)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=sentence):
        list(source(tmp_path, **settings).documents())
    corpus = source(tmp_path, bad="skip", **settings)
    assert len(list(corpus.documents())) == 2
    assert corpus.skipped.count == 1


def test_data_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    rows = [{"text": "two words", "label": label} for label in ("negative", "positive", "odd")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "labelled", "paths": [str(tmp_path / "a.jsonl")]}
    config = decode(DataConfig, {"source": source, "tokenizer": "byte", "folder": str(tmp_path / "data" / "here")})
    with pytest.raises(ConfigError, match="is no class"):
        prepare(config, processes=1, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
