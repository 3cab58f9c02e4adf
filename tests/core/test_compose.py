"""Composition: what wins, what is replaced whole, where each value came from, and what a mistake is told."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xscale.core.compose import compose, dump
from xscale.core.errors import ConfigError
from xscale.core.yaml_reader import parse


def write(folder: Path, **texts: str) -> Path:
    """Files under a configs/ folder, `model__tiny=...` as configs/model/tiny.yaml; returns configs/run/run.yaml."""
    for name, text in texts.items():
        path = folder / "configs" / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "configs/run/run.yaml"


def test_later_wins(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        model__a="x: {a: 1, b: 1, c: 1, d: 1}",
        model__b="x: {b: 2, c: 2, d: 2}",
        run__run="use: [model/a, model/b]\nx: {c: 3, d: 3}",
    )
    composed = compose(run, ["x.d=4"])
    assert composed.data == {"x": {"a": 1, "b": 2, "c": 3, "d": 4}}
    assert {key: Path(origin).name for key, origin in composed.origin.items()} == {
        "x.a": "a.yaml",
        "x.b": "b.yaml",
        "x.c": "run.yaml",
        "x.d": "command line",
    }


def test_used_files_use_others(tmp_path: Path) -> None:
    run = write(tmp_path, model__a="a: 1\nb: 1", model__b="use: model/a\nb: 2", run__run="use: model/b")
    assert compose(run, []).data == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("below", "override", "wanted"),
    [
        ("part: {kind: a, x: 1}", "part.kind=b", {"kind": "b"}),
        ("part: {kind: a, x: 1}", "part={kind: b, y: 2}", {"kind": "b", "y": 2}),
        ("part: {kind: a, x: 1}", "part={y: 2, kind: a}", {"kind": "a", "x": 1, "y": 2}),
        ("part: {kind: a, x: 1}", "part={y: 2, kind: b}", {"kind": "b", "y": 2}),
        ("part: {kind: a, x: 1}", "part=b", "b"),
        ("part: a", "part.x=1", {"kind": "a", "x": 1}),
        ("part: {kind: a, x: 1}", "part.x=[1, 2]", {"kind": "a", "x": [1, 2]}),
        ("part: {x: [1, 2, 3]}", "part.x=[4]", {"x": [4]}),
        ("part: {x: {y: 1}}", "part.x=null", {"x": None}),
        ("part: null", "part.x.y=1", {"x": {"y": 1}}),
        ("part: {x: 1}", "part.x.y=1", {"x": {"y": 1}}),
    ],
)
def test_another_part_replaces_and_a_mapping_merges(tmp_path: Path, below: str, override: str, wanted: Any) -> None:
    composed = compose(write(tmp_path, run__run=below), [override])
    assert composed.data["part"] == wanted
    assert all(known(composed.data, path) for path in composed.origin), composed.origin


def known(data: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E6", 1e6),
        ("-2.5", -2.5),
        (".5", 0.5),
        ("3", 3),
        ("0x10", 16),
        ("null", None),
        ("true", True),
        ("'1e-3'", "1e-3"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("1.2.3", "1.2.3"),
        (".inf", float("inf")),
        ("[1, 2e1]", [1, 20.0]),
        ("a: b", {"a": "b"}),
    ],
)
def test_values_are_what_they_look_like(text: str, value: Any) -> None:
    found = parse(text, "here")
    assert found == value
    assert type(found) is type(value)


KEYS = st.from_regex(r"key_[a-z_]{0,8}", fullmatch=True)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"key_[a-z_]{0,8}", fullmatch=True), inner)
    ),
    max_leaves=12,
)


@pytest.mark.long
@example(data={"a": "\x85"})
@example(data={"a": "\xa0"})
@example(data={"a": "x\u2028y"})
@given(data=st.dictionaries(KEYS, PLAIN, min_size=1))
def test_what_is_dumped_reads_back(data: dict[str, Any]) -> None:
    assert parse(dump(data), "dumped") == data
    assert parse(dump(data, {}), "dumped with origins") == data


def test_a_dump_says_where_each_value_came_from(tmp_path: Path) -> None:
    composed = compose(write(tmp_path, run__run="a: {b: 1}\nc: [1, 2]"), ["a.d=2"])
    lines = dump({**composed.data, "e": 3}, composed.origin).splitlines()
    assert [line.split("#")[-1].strip().split("/")[-1] for line in lines if "#" in line] == [
        "run.yaml",
        "command line",
        "run.yaml",
        "default",
    ]


@pytest.mark.parametrize(
    ("texts", "overrides", "said"),
    [
        ({"run__run": "a: 1\na: 2"}, [], "the key 'a' is given twice"),
        ({"run__run": "a: [1"}, [], "run.yaml:1: this is not YAML"),
        ({"run__run": "- 1"}, [], "a config is a mapping"),
        ({"run__run": "1: 2"}, [], "config keys must be strings"),
        ({"run__run": "use: model/tiny", "model__tinny": "a: 1"}, [], "Did you mean 'tinny.yaml'?"),
        ({"run__run": "use: run/run"}, [], "`use` is circular"),
        ({"run__run": "a: 1"}, ["a"], "an override is written key=value"),
        ({"run__run": "a: 1"}, ["=1"], "an override is written key=value"),
        ({"run__run": "a: 1"}, ["a..b=1"], "an override is written key=value"),
        ({"run__run": "a: 1"}, ["a=[1"], "this is not YAML"),
        ({"run__run": "optimizer: {groups: [{lr: 1}]}"}, ["optimizer.groups[1].lr=2"], "optimizer.groups has 1 entry"),
        ({"run__run": "a: 1"}, ["optimizer.groups[x].lr=2"], "'groups[x]' is no part of a key"),
        ({"run__run": "use: 3"}, [], "run.yaml: use: must be a list of config names"),
        ({"run__run": "use: {a: b}"}, [], "run.yaml: use: must be a list of config names"),
        ({"run__run": "use: [1]"}, [], "run.yaml: use: must be a list of config names"),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, texts: dict[str, str], overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(write(tmp_path, **texts), overrides)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    run = write(tmp_path, run__run="a: 1")
    with pytest.raises(ConfigError, match=r"Did you mean 'run\.yaml'\?"):
        compose(run.with_name("runn.yaml"), [])
    run.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"not UTF-8|not YAML"):
        compose(run, [])
    with pytest.raises(ConfigError, match="cannot read"):
        compose(tmp_path, [])


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert compose(write(tmp_path, run__run=""), []).data == {}
    assert compose(write(tmp_path, run__run="use:\n"), []).data == {}
