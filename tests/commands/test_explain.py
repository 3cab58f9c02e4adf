"""`xscale explain`: each key as the code defines it, an override that works, sections, kinds, and nearest keys."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xscale.cli.main import main
from xscale.commands.explain import config_keys, explain, override_of
from xscale.core.compose import compose, dump
from xscale.core.config import Config, decode, encode, sentences
from xscale.core.keys import Key
from xscale.nn.ffn.moe import Moe
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
    assert "override: model.stack.block.ffn.kind=moe model.stack.block.ffn.capacity_factor=VALUE\n" in text
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
    assert "It has no keys." in printed(capsys, "fourier")


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


def test_an_entry_of_a_list_is_set_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "model.stack.rules.every")
    assert text.startswith("model.stack.rules[].every: int >= 1\n")
    assert "override: the whole list: model.stack.rules='[...]'\n" in text


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


def has_required(path: str) -> bool:
    """Whether an optional section has keys without a default: it is given as a whole."""
    above = path.rpartition(".")[0]
    return bool(above) and any(
        key.type == "section or null" and not all(child.has_default for child in config_keys().children(key))
        for key in config_keys().at(above)
    )


@pytest.mark.long
def test_an_override_that_is_printed_sets_its_key(tmp_path: Path) -> None:
    keys = config_keys()
    (tmp_path / "run.yaml").write_text(dump(encode(Recipe())), encoding="utf-8")
    seen: dict[int, Key] = {}
    for key in keys.all:
        if "[]" not in key.path:
            seen.setdefault(id(key.node), key)
    checked = 0
    for key in list(seen.values())[::4]:
        words = override_of(keys, key)
        if "VALUE" in words or has_required(key.path):
            continue
        value: Any = decode(Recipe, compose(tmp_path / "run.yaml", words.split()).data)
        for name in key.path.split("."):
            value = getattr(value, name)
        default = key.node["default"]
        assert (value.kind if isinstance(value, Config) else value) == default, words
        checked += 1
    assert checked > 80


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("moe.capacity_facter", "Did you mean model.stack.block.ffn.capacity_factor"),
        ("optimzer.lr", "Did you mean optimizer.lr"),
        ("train.stpes", "Did you mean train.steps"),
        ("model.stack.block.ffn.kind.x", "there is no such config key"),
        ("xyzzy", "`xscale explain` lists the sections"),
        ("", "`xscale explain` lists the sections"),
        ("..", "`xscale explain` lists the sections"),
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


def test_explain_imports_no_torch() -> None:
    code = "import sys; from xscale.commands.explain import explain; explain('core'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
