"""JSON lines: the field, compression, and a line that is at fault."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from xscale.core.errors import ConfigError
from xscale.data.source import files
from xscale.data.source.jsonl import Jsonl

LINES = [{"text": "one\ntwo", "id": 1}, {"text": " "}, {"text": "käse ▁"}]


def source(folder: Path, **settings: Any) -> Jsonl:
    return Jsonl(Jsonl.Config(paths=(str(folder),), **settings))


def test_plain_gz_and_zst_are_read_alike(tmp_path: Path) -> None:
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(data))
    (tmp_path / "README").write_text("not JSON")
    found = [(Path(one.name).name, one.text) for one in source(tmp_path).documents()]
    second = len(json.dumps(LINES[0])) + len(json.dumps(LINES[1])) + 2
    texts = ["one\ntwo", "käse ▁"]
    names = [f"{name}:{at}" for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst") for at in (0, second)]
    assert found == list(zip(names, texts * 3, strict=True))


def test_shards_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {number}" * (number % 5 + 1) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    monkeypatch.setattr(files.split_into_ranges, "__defaults__", (500,))
    corpus = source(tmp_path, field="body")
    assert len(corpus.byte_ranges()) > 10
    assert [one.text for one in corpus.documents()] == texts
    shards = [[one.text for one in corpus.documents(shard, 3)] for shard in range(3)]
    assert sorted(text for one in shards for text in one) == sorted(texts)
    assert all(shards)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", r"a\.jsonl:17: the line .* is not JSON.* data\.source\.bad=skip leaves out and counts"),
        ("[1]", "is not an object"),
        ('{"txet": "x"}', r"has no field 'text'. Did you mean 'txet'\? Set data.source.field"),
        ('{"text": 1}', "the field 'text' must be a string, got int"),
        ('{"text": null}', r"must be a string, got null\. Set data\.source\.field\. data\.source\.bad=skip"),
        ('{"text": "a\\u0000"}', "NUL or half a surrogate"),
        ('{"text": "a\\ud800"}', "NUL or half a surrogate"),
    ],
)
def test_a_line_at_fault_is_named_by_its_byte(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=what):
        list(source(tmp_path).documents())


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}]', '[\n {"text": "a"},\n {"text": "b"}\n]\n', '[\n{"text": "a"}]', ' [{"text": "a"},\n']
)
def test_an_array_in_the_place_of_lines_is_called_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"array.*Write an object a line: jq -c '\.\[\]' \S+a\.jsonl$"):
        list(source(tmp_path).documents())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "a", "b": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"text": "a", "b": ' + '{"c":' * 100_000 + "1" + "}" * 100_000 + "}", "nested too deeply"),
        ('{"text": "a", "b": ' + "7" * 5000 + "}", "thousands of digits"),
    ],
)
def test_json_that_python_refuses_names_its_line(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"a\.jsonl:17: the line that starts at this byte is not JSON: .*{what}"):
        list(source(tmp_path).documents())
