"""Tables of other trainers' keys: every key here exists, conversions, and the page that is drawn from them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.convert.trainers.coming_from_page import PAGE, drawn, on_page
from xscale.commands.show.explain import config_keys
from xscale.convert.trainers.key_table import UNITS, TrainerTable, UnfitError
from xscale.convert.trainers.read_file import python_assignments
from xscale.convert.trainers.shell_words import ShellValue, shell_options
from xscale.convert.trainers.to_recipe import TABLES, convert, table_of
from xscale.core.config_keys.keys import ConfigKeys

FFN = "model.stack.block.ffn"


def paths_of(table: TrainerTable) -> Iterator[str]:
    yield from table.fixed
    yield from (derived.path for derived in table.derived)
    for entry in table.entries:
        yield from ([entry.path] if entry.path else [])
        for settings in entry.values.values():
            yield from settings


def is_known(keys: ConfigKeys, path: str) -> bool:
    path = path.replace("moe.", f"{FFN}.", 1) if path.startswith("moe.") else path
    above, _, last = path.rpartition(".")
    return bool(keys.at(path)) or (last == "kind" and bool(keys.at(above)))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_key_of_a_table_exists_here(table: TrainerTable) -> None:
    keys = config_keys()
    assert [path for path in paths_of(table) if not is_known(keys, path)] == []
    assert not is_known(keys, "train.nonesuch"), "negative control"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_reads_its_own_keys(table: TrainerTable) -> None:
    names = {entry.name for entry in table.entries}
    assert set(table.defaults) <= names
    assert {name for entry in table.entries for name in entry.of} <= names
    assert [entry.name for entry in table.entries if table.key_name(entry.name) != entry.name] == []
    assert [entry.name for entry in table.entries if not (entry.path or entry.values or entry.instead)] == []


VALUES: dict[str, tuple[str, Any, list[Any], Any]] = {
    "a rate as a ratio": ("divided by", 6e-5, [6e-4], 0.1),
    "ranks that are left count as one": ("times", 4, [1, -1], 4),
    "tokens in sequences": ("in units of", 524288, [2048], 256),
    "a fraction of the steps": ("fraction of", 0.05, [1000], 50),
    "a fraction, or steps": ("steps or fraction of", 0.03, [1000], 30),
    "steps, or a fraction": ("steps or fraction of", 30, [1000], 30),
    "no clipping": ("0 is null", 0.0, [], None),
    "betas": ("second of two", [0.9, 0.95], [], 0.95),
    "a gated layer's width": ("gated hidden", 1024, [], 2688),
    "a width in heads": ("width", 10, [64, 128], 640),
    "heads of a width": ("heads", 10, [64, 128], 5),
    "stages of a rank": ("virtual stages", 2, [32, 4], 4),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_converted(name: str) -> None:
    unit, value, others, expected = VALUES[name]
    assert UNITS[unit].convert(value, others) == expected


UNFIT: dict[str, tuple[str, Any, list[Any]]] = {
    "tokens that are no sequences": ("in units of", 1000, [3]),
    "a text": ("divided by", "much", [1.0]),
    "a rate of 0": ("divided by", 1e-5, [0.0]),
    "a truth": ("times", True, [1]),
    "three betas": ("first of two", [1, 2, 3], []),
    "left to the trainer": ("positive", -1, []),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_value_that_does_not_fit_is_told(name: str) -> None:
    unit, value, others = UNFIT[name]
    with pytest.raises(UnfitError):
        UNITS[unit].convert(value, others)


SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "values": ("run --a 1 --b=2.5 --c x --flag", {"a": 1, "b": 2.5, "c": "x", "flag": True}),
    "the next command is no value": ("run --flag\necho done", {"flag": True}),
    "a continued line": ("run --a 1 \\\n --b 2", {"a": 1, "b": 2}),
    "several values": ("run --path 0.3 x 0.7 y", {"path": [0.3, "x", 0.7, "y"]}),
    "an array": ("A=(\n --a 1 # one\n --b\n)\nrun ${A[@]}", {"a": 1, "b": True}),
    "a text of options": ('A="\n --a 1\n --b 2\n"\nrun $A', {"a": 1, "b": 2}),
    "a variable": ("TP=2\nrun --tp $TP --pp ${PP:-4}", {"tp": 2, "pp": 4}),
    "a variable of a variable": ("A=3\nB=${A}\nrun --b $B", {"b": 3}),
    "an argument of the script": ("run --save $1", {"save": ShellValue("$1")}),
    "a variable of itself": ("A=$A\nrun --a $A", {"a": ShellValue("$A")}),
    "a comment": ("# run --a 1\nrun --b 2", {"b": 2}),
    "a negative number": ("run --a -1", {"a": -1}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_options_of_a_script(name: str) -> None:
    text, expected = SCRIPTS[name]
    assert shell_options(text) == expected


PYTHON: dict[str, tuple[str, dict[str, Any]]] = {
    "arithmetic": ("a = 5 * 8\nb = a // 2\nc = 2**19", {"a": 40, "b": 20, "c": 524288}),
    "texts and truths": ("a = 'x'\nb: bool = True\nc = None", {"a": "x", "b": True, "c": None}),
    "a call is left out": ("a = open('x')\nb = 1", {"b": 1}),
    "a large power is left out": ("a = 9**99999\nb = 1", {"b": 1}),
    "a division by zero is left out": ("a = 1 / 0\nb = 1", {"b": 1}),
    "what is within functions is not read": ("def f():\n    a = 1\nb = 1", {"b": 1}),
}


@pytest.mark.parametrize("name", PYTHON)
def test_the_assignments_of_a_python_file(name: str) -> None:
    text, expected = PYTHON[name]
    assert python_assignments(text) == expected


LEFT_OUT: dict[str, tuple[dict[str, Any], str, str]] = {
    "a key of experts without experts": ({"moe_router_topk": 4}, "moe_router_topk", "without experts"),
    "a key of another schedule": (
        {"lr_decay_style": "constant", "min_lr": 1e-5},
        "min_lr",
        "no effect without schedule.kind=cosine or wsd",
    ),
    "a key that another one is to explain": ({"train_samples": 1000}, "train_samples", "global_batch_size"),
    "a word of ours": ({"n_layer": 3}, "n_layer", "model.stack.depth, perhaps"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_key_is_never_left_out_silently(name: str) -> None:
    keys, key, why = LEFT_OUT[name]
    (megatron,) = [table for table in TABLES if table.name == "Megatron-LM"]
    converted = convert(megatron, {"num_layers": 2, "lr": 1e-3, **keys})
    assert [item.key for item in converted.left_out] == [key]
    assert why in converted.left_out[0].why


def test_the_page_is_drawn_from_the_tables() -> None:
    assert on_page(PAGE.read_text(encoding="utf-8")) == drawn(), (
        "python -m tests.convert.trainers.coming_from_page --write"
    )


def test_the_trainer_with_most_of_the_keys_is_taken(tmp_path: Any) -> None:
    keys = {"--nproc_per_node": 8, "--depth": 4, "--max-seq-len": 64}
    assert table_of(tmp_path / "a.sh", keys).name == "nanochat"
