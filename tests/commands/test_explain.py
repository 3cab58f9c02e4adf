"""`xscale explain`: each key as the code defines it, an override that works, sections, kinds, and nearest keys."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xscale.cli.main import main
from xscale.commands.show.example_values import example_of
from xscale.commands.show.explain import config_keys, explain
from xscale.commands.show.explain_override import location_word, override_of
from xscale.commands.show.recipes import config_file
from xscale.core.compose import compose, compose_mapping, flow_text
from xscale.core.config import Config, decode, encode, sentences
from xscale.core.config_keys.keys import FAMILY, ConfigKeys, Key, choices, type_text
from xscale.core.config_keys.override_path import path_text
from xscale.core.config_keys.present_keys import root_of, walk
from xscale.core.yaml_reader import parse
from xscale.nn.ffn.moe.moe import Moe
from xscale.optim.optimizer.lion import Lion
from xscale.recipe import Recipe


def printed(capsys: pytest.CaptureFixture[str], query: str | None) -> str:
    explain(query)
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], query: str) -> Any:
    explain(query, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_a_key_is_explained_as_its_config_class_defines_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "moe.capacity_factor")
    assert text.startswith("model.stack.block.ffn.capacity_factor: float > 0 or null\n")
    assert " ".join(sentences(Moe.Config)["capacity_factor"].split()) in " ".join(text.split())
    assert "default: null\n" in text
    assert "parts with this key: ffn moe (in model decoder, encoder)\n" in text
    assert "override: moe.capacity_factor=1.0\n" in text
    assert "model.encoder.block.ffn.capacity_factor" in text
    assert "router" not in text, "that is a key of another part, below the mixture's"


def test_an_exact_path_names_all_parts_with_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "optimizer.lr")
    assert text.startswith("optimizer.lr: float >= 0\n")
    assert "parts with this key: optimizer adamw, adamw_8bit, lion, schedule_free_adamw\n" in text
    assert "override: optimizer.lr=0.001\n" in text
    (entry,) = as_json(capsys, "lion.lr")
    assert entry["needs"] == [
        {"slot": "optimizer", "family": "optimizer", "kinds": ["adamw", "adamw_8bit", "lion", "schedule_free_adamw"]}
    ]
    assert entry["default"] == Lion.Config().lr


def test_old_names_lead_to_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train.clip")
    assert text.startswith("train.clip_grad_norm: float > 0 or null\n")
    assert "old name, read for one version: clip\n" in text
    assert "routing_transformer: part of the family core" in printed(capsys, "core.routing")


def test_a_section_lists_its_keys_and_a_slot_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train.spike")
    for name, sentence in sentences(type(Recipe().train.spike)).items():
        assert f"\n    train.spike.{name}: " in text
        assert sentence.split("\n")[0].split(". ")[0] in text
    core = printed(capsys, "model.block.mixer.core")
    assert "model.stack.block.mixer.core: part of the family core\n" in core
    assert "\n    block_sparse: Child et al. 2019" in core
    assert "\n    entmax: " in core
    assert "Old name: adaptive." in core
    everything = printed(capsys, None)
    assert all(f"\n  {section}: " in everything for section in Recipe.model_fields)


def test_a_kind_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "moe")
    assert text.startswith("moe: part of the family ffn, chosen by model.stack.block.ffn=moe\n")
    assert all(f"\n    model.stack.block.ffn.{name}: " in text for name in Moe.Config.model_fields)
    assert "It has no keys." in printed(capsys, "efficient_attention")


def test_a_key_that_parts_define_otherwise_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "model.stack.block.mixer.core.window")
    assert "  parts with this key: core nsa (in model decoder, encoder; mixer attention, " in text
    assert (
        text.count("  otherwise in [core poolingformer]: int >= 1, default 64. Keys of the first level's window") == 1
    )
    assert "otherwise in [core nsa]" not in text


def test_a_name_of_many_keys_lists_them_with_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "dropout")
    assert "keys are called so; give more of the path" in text
    assert "\n  model.stack.block.mixer.dropout: float in [0, 1), default 0.0. " in text
    assert "[mixer attention" in text


def test_an_entry_of_a_list_has_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "model.stack.rules.every")
    assert text.startswith("model.stack.rules[].every: int >= 1\n")
    assert "override: 'model.stack.rules[*].every=1'\n" in text


def test_the_defaults_are_those_of_the_config_classes() -> None:
    """An independent reading: the values of `Recipe()` and its sections themselves."""
    keys = config_keys()
    checked = 0

    def check(config: Config, path: str) -> None:
        nonlocal checked
        for name in type(config).model_fields:
            value, field = getattr(config, name), type(config).model_fields[name]
            (key,) = keys.at(f"{path}{field.alias or name}")
            if isinstance(value, Config) and value.kind is None:
                check(value, f"{path}{name}.")
            elif not isinstance(value, Config):
                plain = list(value) if isinstance(value, tuple) else value
                assert key.node["default"] == plain, key.path
                checked += 1

    for section in Recipe.model_fields:
        value = getattr(Recipe(), section)
        if isinstance(value, Config) and value.kind is None:
            check(value, f"{section}.")
    assert checked > 50


BESIDE: dict[str, dict[str, Any]] = {
    "data.blend_rates": {"data": {"blend": [{"prepared": "a"}]}},
    "data.blend_limit": {"data": {"blend": [{"prepared": "a"}], "blend_rates": "samples"}},
    "data.source.separator": {"data": {"source": {"kind": "text", "document": "separator", "separator": "x"}}},
    "data.blend_temperature": {"data": {"blend": [{"prepared": "a"}]}},
    # Without a file the number is that of a tokenizer that is trained, and with one that of the file.
    "data.tokenizer.file": {"data": {"tokenizer": {"vocabulary": 8192}}},
}
"""Key -> what a config must have beside it."""


def another(keys: ConfigKeys, node: Any, value: Any) -> Any:
    """A value of the key's type that is not `value`."""
    if value is not None and "null" in type_text(node) and "examples" not in node:
        return None
    kinds = [kind for branch in (node, *node.get("anyOf", ())) for kind in family_kinds(keys, branch)]
    if values := [*(parse(choice, "choice") for choice in choices(node)), *kinds]:
        return next(other for other in values if other != value)
    if isinstance(value, list):
        items = node.get("prefixItems", [node.get("items")])
        if not value or isinstance(value[0], dict):
            return [*value, value[-1]] if "at least" in type_text(node) else []
        return [another(keys, items[0] or node["anyOf"][0]["items"], value[0]), *value[1:]]
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, dict):
        return {"rmsnorm": "torch"}
    step = node.get("multipleOf", 1) if isinstance(value, int) else 0.015625
    high = node.get("maximum", node.get("exclusiveMaximum"))
    return value - step if high is not None and value + step >= high else value + step


def family_kinds(keys: ConfigKeys, node: Any) -> list[str]:
    reference = node.get("$ref", "")
    return list(keys.parts(reference.removeprefix(FAMILY))) if reference.startswith(FAMILY) else []


def recipe_with(keys: ConfigKeys, key: Key, value: Any) -> dict[str, Any]:
    """The smallest config that has the key, of the first part that has it, with a value."""
    kinds = {need.slot: need.kinds[0] for need in key.needs}
    data: dict[str, Any] = {}
    level, path = data, ""
    *above, last = key.path.split(".")
    for segment in above:
        path = f"{path}.{segment}".lstrip(".")
        inside: dict[str, Any] = {"kind": kinds[path]} if path in kinds else {}
        section = next((key for key in keys.at(path) if key.path == path), None)
        if path not in kinds and section is not None:
            inside = example_of(keys, {"$ref": reference}) if (reference := section_of(section.node)) else {}
        level[segment.removesuffix("[]")] = [inside] if segment.endswith("[]") else inside
        level = inside
    level[last.removesuffix("[]")] = value
    return data


def section_of(node: Any) -> str:
    """The section that a key, or an entry of its list, is."""
    if "$ref" in node:
        return "" if node["$ref"].startswith(FAMILY) else str(node["$ref"])
    inner = [*node.get("anyOf", ()), *([node["items"]] if isinstance(node.get("items"), dict) else [])]
    return next(filter(None, map(section_of, inner)), "")


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [line for name in before for line in differences(before[name], now[name], f"{path}.{name}".lstrip("."))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            line for n, pair in enumerate(zip(before, now, strict=True)) for line in differences(*pair, f"{path}[{n}]")
        ]
    return [] if before == now else [path]


def merged(data: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    deeper = {name: merged(data[name], value) for name, value in beside.items() if isinstance(value, dict)}
    return {**data, **beside, **deeper}


def check_printed_override(keys: ConfigKeys, key: Key) -> str | None:
    """Type the override that `explain` prints in a recipe with another value; None, or what it did wrong."""
    printed = override_of(keys, key)
    (typed,) = shlex.split(printed)
    value = parse(typed.partition("=")[2], "printed")
    data = recipe_with(keys, key, another(keys, key.node, value))
    data = merged(data, BESIDE.get(key.path, {}))
    before = encode(decode(Recipe, compose_mapping(data, []).data))
    now = encode(decode(Recipe, compose_mapping(data, [typed]).data))
    changed = differences(before, now)
    same = [path_text(other.path) for other in walk(keys, root_of(keys, now)) if other.key.node == key.node]
    if any(not path.startswith(tuple(same)) for path in changed) or not changed:
        return f"{printed} of {key.path} changes {changed}"
    return None


def leaf_keys(keys: ConfigKeys) -> list[Key]:
    """Each key that is no section, once for each part or section that has it."""
    seen: dict[int, Key] = {}
    for key in keys.all:
        if keys.family(key) is not None or key.path.endswith("[]") or not keys.children(key):
            seen.setdefault(id(key.node), key)
    return list(seen.values())


@pytest.mark.parametrize(
    "every",
    [pytest.param(32, id="one in thirty"), pytest.param(1, id="all", marks=[pytest.mark.long, pytest.mark.nightly])],
)
def test_an_override_that_is_printed_sets_its_key_alone(every: int) -> None:
    keys = config_keys()
    # Those with examples among all: rules that the schema does not have refuse some of their values.
    leaves = leaf_keys(keys)
    checked = [key for at, key in enumerate(leaves) if at % every == 0 or "examples" in key.node]
    wrong = [fault for key in checked if (fault := check_printed_override(keys, key)) is not None]
    assert wrong == []
    assert len(checked) > 700 / every


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["quickstart", "mixtral_8x7b", "t5_span"])
def test_an_override_that_is_printed_of_a_recipe_sets_the_key_there_alone(recipe: str) -> None:
    keys, file = config_keys(), config_file(recipe)
    data = compose(file, []).data
    before = encode(decode(Recipe, data))
    checked = 0
    for place in walk(keys, root_of(keys, data)):
        if keys.children(place.key) or place.path[0] == "about" or place.value in (None, ""):
            continue
        (typed,) = shlex.split(location_word(keys, place))
        path, _, text = typed.partition("=")
        value = parse(text, "printed")
        assert differences(before, encode(decode(Recipe, compose(file, [typed]).data))) == [], typed
        if isinstance(value, list | dict) or isinstance(place.path[-1], int) or place.key.path in BESIDE:
            continue
        other = another(keys, place.key.node, value)
        changed = encode(decode(Recipe, compose(file, [f"{path}={flow_text(other)}"]).data))
        same = path_text(place.path)
        assert all(line == same or line.startswith(f"{same}.") for line in differences(before, changed)), typed
        assert changed != before, typed
        checked += 1
    assert checked > 60


def test_where_a_recipe_has_a_key_is_printed_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = compose(config_file("quickstart"), [])

    def lines(query: str) -> list[str]:
        explain(query, recipe, "quickstart")
        return capsys.readouterr().out.partition("in quickstart:\n")[2].splitlines()

    assert lines("moe.capacity_factor") == ["  'model.stack.rules[0].ffn.capacity_factor=1.25'"]
    assert lines("model.stack.block.ffn.capacity_factor") == lines("moe.capacity_factor"), "there is none at the path"
    assert lines("attention.kv_heads") == [
        "  model.stack.block.mixer.kv_heads=2",
        "  'model.stack.rules[0].mixer.kv_heads=2'",
        "  all of them: attention.kv_heads=2",
    ]
    assert lines("optimizer.lr") == ["  optimizer.lr=0.002"]
    assert lines("router.kind") == ["  'model.stack.rules[0].ffn.router.kind=switch'"]
    assert "  train.spike.policy=none" in lines("train.spike")
    assert lines("moe")[0] == "  'model.stack.rules[0].ffn.kind=moe'"
    explain("nsa.window", recipe, "quickstart")
    assert capsys.readouterr().out.endswith("quickstart has no such key.\n")
    explain("moe.experts", recipe, "quickstart", as_json=True)
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["in_recipe"] == [{"key": "model.stack.rules[0].ffn.experts", "value": 8}]


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("moe.capacity_facter", "Did you mean model.stack.block.ffn.capacity_factor"),
        ("optimzer.lr", "Did you mean optimizer.lr"),
        ("train.stpes", "Did you mean train.steps"),
        ("learning_rate", "Did you mean optimizer.lr?"),
        ("num_experts", "Did you mean moe.experts?"),
        ("model.stack.block.ffn.kind.x", "there is no such config key"),
        ("xyzzy", "`xscale explain` lists the sections"),
        ("", "`xscale explain` lists the sections"),
        ("..", "`xscale explain` lists the sections"),
        (".", "`xscale explain` lists the sections"),
        ("=", "`xscale explain` lists the sections"),
        ("rules[x].every", "Did you mean model.stack.rules[].every?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    query: str, suggestion: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["xscale", "explain", query])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "there is no such config key" in output.err
    assert suggestion in output.err


def test_the_folder_of_a_run_is_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("optimizer: {kind: lion, lr: 0.25}\n", encoding="utf-8")
    said = {}
    for words in (["optimizer.lr", "mine"], ["mine"]):
        monkeypatch.setattr("sys.argv", ["xscale", "explain", *words])
        with pytest.raises(SystemExit):
            main()
        said[len(words)] = "".join(capsys.readouterr())
    assert said[2].endswith("in mine:\n  optimizer.lr=0.25\n")
    assert "It is a run: `xscale explain KEY mine` says where its config has a key." in said[1]


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("moe.capacity_factor=2", "moe.capacity_factor"),
        ("optimizer.lr=", "optimizer.lr"),
        ("optimizer.", "optimizer"),
        ("model.stack.rules[0].ffn", "model.stack.rules[].ffn"),
        ("model.stack.rules.0.ffn.kind", "model.stack.rules[].ffn"),
        ("model.stack.rules[*].ffn.kind=moe", "model.stack.rules[].ffn"),
        ("rules[1].every=2", "rules.every"),
        ("optimizer.ns_coefficients[0]", "optimizer.ns_coefficients"),
    ],
)
def test_what_an_override_or_a_message_has_is_explained(
    typed: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key with a value, with the index of an entry, and as completion leaves it."""
    assert printed(capsys, typed) == printed(capsys, key)


def test_an_entry_that_is_named_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rules = "model.stack.rules=[{every: 2, ffn: {kind: moe, experts: 4}}, {every: 3, ffn: {kind: moe, experts: 8}}]"
    recipe = compose(config_file("bytes"), [rules])
    shown = {}
    for query in ("rules[1].ffn.experts", "model.stack.rules.1.ffn.experts=2", "model.stack.rules[*].ffn.experts"):
        explain(query, recipe, "bytes")
        shown[query] = capsys.readouterr().out.partition("in bytes:\n")[2].splitlines()
    second = "  'model.stack.rules[1].ffn.experts=8'"
    # As an override of all it has the value of the first.
    assert list(shown.values()) == [
        [second],
        [second],
        ["  'model.stack.rules[0].ffn.experts=4'", second, "  all of them: moe.experts=4"],
    ]


def test_explain_imports_no_torch() -> None:
    code = (
        "import sys; from xscale.commands.show.explain import explain; "
        "explain('core'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
