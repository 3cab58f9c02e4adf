"""YAML of somebody else: the core schema of YAML 1.2, and every odd text is one sentence before it is composed."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xscale.core.compose import COMMAND_LINE, FILES, compose
from xscale.core.config import Config, decode
from xscale.core.errors import ConfigError
from xscale.core.yaml_reader import DEPTH, LARGEST, NODES, SMALLEST, TEXT_BYTES, parse, read_text
from xscale.core.yaml_writer import flow_text

CORE_SCHEMA: dict[str, Any] = {
    # YAML 1.2.2, section 10.3.2; what YAML 1.1 reads otherwise is text.
    "010": 10,
    "-007": -7,
    "0o10": 8,
    "0x1F": 31,
    "0b101": "0b101",
    "1_000": "1_000",
    "12:30": "12:30",
    "190:20:30": "190:20:30",
    "1:30.5": "1:30.5",
    "2026-11-27": "2026-11-27",
    "2026-02-30": "2026-02-30",
    "2026-02-30T10:00:00Z": "2026-02-30T10:00:00Z",
    "yes": "yes",
    "No": "No",
    "on": "on",
    "OFF": "OFF",
    "y": "y",
    "true": True,
    "FALSE": False,
    "tRUE": "tRUE",
    "~": None,
    "": None,
    "Null": None,
    "nULL": "nULL",
    "=": "=",
    "1e3": 1000.0,
    "+12e03": 12000.0,
    ".5": 0.5,
    "5.": 5.0,
    "-.inf": -math.inf,
    "inf": "inf",
    "0x": "0x",
    "0o8": "0o8",
    str(LARGEST): LARGEST,
    str(SMALLEST): SMALLEST,
    "{<<: {a: 1}, b: 2}": {"a": 1, "b": 2},
    "!!str 12": "12",
    "!!float 12": 12.0,
}


@pytest.mark.parametrize("text", CORE_SCHEMA)
def test_a_scalar_is_that_of_yaml_1_2(text: str) -> None:
    value = parse(text, "here")
    assert value == CORE_SCHEMA[text]
    assert type(value) is type(CORE_SCHEMA[text])


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGES = "m0: &m0 {a: 1, b: 2}\n" + "".join(
    f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 9)}]}}\n" for level in range(1, 12)
)
HOSTILE = {
    "lists nested deeply": ("[" * 100_000, f"here:1: it is nested more than {DEPTH} deep"),
    "mappings nested deeply": ("{a: " * 100_000, "nested more than"),
    "blocks nested deeply": ("- " * 100_000, "nested more than"),
    "lines nested deeply": ("".join(" " * depth + "a:\n" for depth in range(1000)), "here:65: it is nested more than"),
    "an alias inside its own list": ("&a [*a]", "here:1: the alias 'a' is inside its own value"),
    "an alias inside its own mapping": ("x: 1\ny: &a {b: {c: *a}}", "here:2: the alias 'a' is inside"),
    "an alias of nothing": ("*a", "found undefined alias"),
    "billion laughs": (LAUGHS, f"it has more than {NODES} values"),
    "merge keys that multiply": (MERGES, f"it has more than {NODES} values"),
    "too many values": ("[" + "1, " * (NODES + 1) + "]", f"it has more than {NODES} values"),
    "an integer of 5,000 digits": ("9" * 5000, "'99999999999999999999...' (5000 characters) is no integer of 64 bits"),
    "a hexadecimal of 5,000 digits": ("0x" + "f" * 5000, "is no integer of 64 bits"),
    "an integer above 64 bits": (str(LARGEST + 1), "is no integer of 64 bits"),
    "an integer below 64 bits": (str(SMALLEST - 1), "is no integer of 64 bits"),
    "a text that is called an integer": ("!!int x", "'x' is no integer of 64 bits"),
    "a text that is called a number": ("!!float x", "'x' is no number"),
    "a text that is called a truth": ("!!bool x", "'x' is not true or false"),
    "a date that is called one": ("!!timestamp 2026-02-30", "timestamp' is no type of a config"),
    "bytes": ("!!binary aGk=", "is no type of a config"),
    "a set": ("!!set {a, b}", "is no type of a config"),
    "an object of Python": ("!!python/object/apply:os.system [true]", "is no type of a config"),
    "a list as a key": ("{[a]: 1}", "found unhashable key"),
    "a mapping as a key": ("? {a: b}\n: 1", "found unhashable key"),
    "a control character": ("a: \x07", "holds a character that YAML does not allow"),
    "half of a surrogate pair": ("a: \ud800", "this is not UTF-8 text"),
    "half of a surrogate pair, escaped": ('a: "\\ud800"', "half of a surrogate pair is no text"),
    "half of a surrogate pair as a key": ('"\\udfff": 1', "half of a surrogate pair is no text"),
    "two documents": ("a: 1\n---\nb: 2", "but found another document"),
    "a text of many megabytes": ("x" * (TEXT_BYTES + 1), f"and may have {TEXT_BYTES}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_yaml_is_a_sentence(name: str) -> None:
    text, sentence = HOSTILE[name]
    with pytest.raises(ConfigError) as refused:
        parse(text, "here")
    assert sentence in str(refused.value)
    assert len(refused.value.problems) == 1
    assert len(str(refused.value)) < 300


def test_without_libyaml_the_bounds_are_the_same() -> None:
    """In a process of its own, with libyaml hidden: the slow parser is what some installations have."""
    program = (
        "import sys, yaml; yaml.__with_libyaml__ = False\n"
        "from xscale.core.yaml_reader import parse\nfrom xscale.core.errors import ConfigError\n"
        "from tests.core.test_yaml_reader import HOSTILE\n"
        "for name, (text, sentence) in HOSTILE.items():\n"
        "    try: parse(text, 'here')\n"
        "    except ConfigError as error: assert sentence in str(error), (name, error)\n"
        "    else: sys.exit(name)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text", ["010", "0o10", "1e-3", "yes", "2026-11-27", "12:30", "1_000", "~", "", ".5", "<<", "="]
)
def test_a_text_that_looks_like_something_else_is_written_in_quotes(text: str) -> None:
    assert parse(flow_text(text), "here") == text
    assert flow_text({"a": text}) == f"{{a: '{text}'}}"


class Section(Config):
    count: int = 1
    flag: bool = False
    name: str = ""


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"count": "1_000"}, "count: must be a valid integer, got '1_000'. Write it without underscores: 1000."),
        ({"flag": "yes"}, "flag: must be a valid boolean, got 'yes'. YAML 1.2 has true and false alone."),
        ({"count": "12:30"}, "count: must be a valid integer, got '12:30'"),
        ({"name": "x"}, ""),
        ({"na\x1b[2Jme\n": 1}, "na\\x1b[2Jme: unknown key."),
        ({"n" * 100_000: 1}, "...: unknown key."),
        ({"count": "9" * 100_000}, "..."),
    ],
)
def test_a_value_that_yaml_1_1_read_otherwise_has_its_spelling(data: dict[str, Any], sentence: str) -> None:
    if not sentence:
        decode(Section, data)
        return
    with pytest.raises(ConfigError) as refused:
        decode(Section, data)
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()


def test_thousands_of_unknown_keys_are_counted(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("".join(f"key{number}: {number}\n" for number in range(20_000)))
    composed = compose(config, [])
    with pytest.raises(ConfigError) as refused:
        decode(Section, composed.data, composed.origin)
    assert len(refused.value.problems) == 51
    assert str(refused.value.problems[-1]) == "19950 more problems"


def test_files_that_use_each_other_twice_are_bounded(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"f{number}.yaml").write_text(f"use: [f{number + 1}, f{number + 1}]\n")
    (tmp_path / "f40.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=f"uses more than {FILES} files"):
        compose(tmp_path / "f0.yaml", [])


def test_an_override_of_many_names_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="nested more than"):
        compose(tmp_path / "a.yaml", [".".join("a" * 5000) + "=1"])


def test_another_part_forgets_the_origins_of_the_old_one_alone(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: {kind: old, a: 1, b: {c: 2}}\nxy: 3\n")
    composed = compose(tmp_path / "a.yaml", ["x.kind=new"])
    assert composed.origin == {"xy": str(tmp_path / "a.yaml"), "x.kind": COMMAND_LINE}


def test_a_config_that_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        compose(tmp_path, [])
    with pytest.raises(OSError, match="not a regular file"):
        read_text(Path("/dev/zero"))
    (tmp_path / "large.yaml").touch()
    with (tmp_path / "large.yaml").open("r+") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ConfigError, match="has more than 4 MiB"):
        compose(tmp_path / "large.yaml", [])
