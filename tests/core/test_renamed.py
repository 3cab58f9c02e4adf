"""Old names of config keys and kinds: read for one version, with one warning each that says the new name."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
import pytest

from xscale.cli.main import main, show_renamed_once
from xscale.core import config as schema
from xscale.core.compose import compose
from xscale.core.config import Config, Slot, decode, encode
from xscale.core.errors import ConfigError
from xscale.core.key_words.renamed import RenamedWarning
from xscale.core.registry import Family

CORES: Family[Any] = Family("core", dict)


class Part:
    class Config(schema.Config):
        pass


@CORES.register("entmax", traits={}, aliases=("adaptive",))
class Entmax(Part):
    class Config(Part.Config):
        renamed: ClassVar[dict[str, str]] = {"rows": "projected_length"}
        projected_length: int = 4
        """Renamed."""
        inner: Annotated[Part.Config, Slot(CORES)] | None = None
        """A slot within a part."""


class Loss(Config):
    renamed: ClassVar[dict[str, str]] = {"balance": "aux_loss_weight"}
    aux_loss_weight: float = pydantic.Field(default=0.0, ge=0)
    """Renamed."""


class Section(Config):
    renamed: ClassVar[dict[str, str]] = {"wage": "loss"}
    loss: Loss = Loss()
    """A renamed section within a section."""
    losses: tuple[Loss, ...] = ()
    """A list of sections."""


class Root(Config):
    core: Annotated[Part.Config, Slot(CORES)] = Entmax.Config()
    """A slot."""
    cores: tuple[Annotated[Part.Config, Slot(CORES)], ...] = ()
    """A list of slots."""
    named: dict[str, str] = {}
    """A mapping with keys of its own, which are not renamed."""
    section: Section = Section()
    """A section."""


def decoded(data: dict[str, Any], origin: dict[str, str] | None = None) -> tuple[Root, list[str]]:
    """The config, and the text of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        root = decode(Root, data, origin)
    assert all(warning.category is RenamedWarning for warning in caught)
    return root, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ({"section": {"wage": {}}}, {"section": {"loss": {}}}, ["section.wage"]),
        (
            {"section": {"wage": {"balance": 0.5}}},
            {"section": {"loss": {"aux_loss_weight": 0.5}}},
            ["section.wage", "section.loss.balance"],
        ),
        (
            {"section": {"losses": [{}, {"balance": 0.5}]}},
            {"section": {"losses": [{}, {"aux_loss_weight": 0.5}]}},
            ["section.losses.1.balance"],
        ),
        ({"core": "adaptive"}, {"core": "entmax"}, ["core"]),
        (
            {"core": {"kind": "adaptive", "rows": 2}},
            {"core": {"kind": "entmax", "projected_length": 2}},
            ["core", "core.rows"],
        ),
        (
            {"core": {"kind": "entmax", "inner": {"kind": "adaptive", "rows": 2}}},
            {"core": {"kind": "entmax", "inner": {"kind": "entmax", "projected_length": 2}}},
            ["core.inner", "core.inner.rows"],
        ),
        (
            {"cores": ["adaptive", {"kind": "entmax", "rows": 2}]},
            {"cores": ["entmax", {"kind": "entmax", "projected_length": 2}]},
            ["cores.0", "cores.1.rows"],
        ),
    ],
)
def test_an_old_name_means_the_new_one_and_warns(old: dict[str, Any], new: dict[str, Any], paths: list[str]) -> None:
    config, messages = decoded(old)
    assert (config, []) == decoded(new)
    assert [message.split(" ")[0].removesuffix(":") for message in messages] == paths


def test_the_warning_says_both_names() -> None:
    _, messages = decoded({"section": {"loss": {"balance": 0.5}}, "core": "adaptive"})
    version = "the old name will be refused in the next version"
    assert sorted(messages) == [
        f"core: the core 'adaptive' is now called 'entmax'; {version}",
        f"section.loss.balance is now called section.loss.aux_loss_weight; {version}",
    ]


def test_new_names_and_keys_of_free_mappings_do_not_warn() -> None:
    data = {"named": {"balance": "a", "rows": "b"}, "core": {"kind": "entmax", "projected_length": 2}}
    config, messages = decoded(data)
    assert messages == []
    assert config.named == {"balance": "a", "rows": "b"}
    assert decoded(encode(config)) == (config, [])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"section": {"wage": {}, "loss": {}}}, "section.wage: given beside 'loss'"),
        ({"core": {"kind": "adaptive", "rows": 1, "projected_length": 1}}, "core.rows: given beside"),
    ],
)
def test_both_names_at_once_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Root, data)
    assert str(caught.value).startswith(said)
    assert "Give only" in str(caught.value)


def test_an_error_is_told_under_the_new_name_with_the_old_ones_origin() -> None:
    origin = {"section.wage.balance": "command line"}
    with pytest.raises(ConfigError) as caught:
        decode(Root, {"section": {"wage": {"balance": -1.0}}}, origin)
    assert str(caught.value) == "section.loss.aux_loss_weight (command line): must be >= 0, got -1.0"
    assert origin == {"section.loss.aux_loss_weight": "command line"}


@pytest.mark.parametrize(
    ("first", "second", "rate"),
    [("aux_loss_weight", "balance", 0.25), ("balance", "aux_loss_weight", 0.75)],
)
def test_the_later_of_two_files_counts_whatever_name_it_uses(
    tmp_path: Path, first: str, second: str, rate: float
) -> None:
    values = {"balance": 0.25, "aux_loss_weight": 0.75}
    for name, use, key in (("below", "[]", first), ("above", "below", second)):
        text = f"use: {use}\nsection:\n  loss:\n    {key}: {values[key]}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    composed = compose(tmp_path / "above.yaml", [])
    root, messages = decoded(composed.data, composed.origin)
    assert root.section.loss.aux_loss_weight == values[second] == rate
    assert len(messages) == 1
    assert composed.origin == {"section.loss.aux_loss_weight": str(tmp_path / "above.yaml")}
    composed = compose(tmp_path / "above.yaml", ["section.loss.balance=0.125"])
    assert decoded(composed.data, composed.origin)[0].section.loss.aux_loss_weight == 0.125


def test_data_is_not_changed() -> None:
    data = {"section": {"wage": {"balance": 0.5}}, "core": {"kind": "adaptive", "rows": 2}}
    before = repr(data)
    decoded(data)
    assert repr(data) == before


def test_wrong_types_are_left_to_the_schema() -> None:
    for data in ({"section": 3}, {"core": 3}, {"core": {"kind": 3}}, {"cores": "adaptive"}, {"cores": {"a": 1}}):
        with pytest.raises(ConfigError):
            decode(Root, data)


def test_the_command_line_prints_each_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Any] = []
    show = show_renamed_once(lambda *given, **_: others.append(given))
    for _ in range(2):
        show(RenamedWarning("a is now called b"), RenamedWarning, "file.py", 1)
    show("plain", UserWarning, "file.py", 1)
    assert capsys.readouterr().err == "xscale: warning: a is now called b\n"
    assert len(others) == 1
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    show_renamed_once(print)(RenamedWarning("a is now called b"), RenamedWarning, "file.py", 1)
    assert capsys.readouterr() == ("", "")


def test_a_config_with_an_old_name_is_warned_of_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "old.yaml"
    config.write_text("model: {kind: decoder, stack: {block: {mixer: {kind: attention, core: adaptive}}}}\n")
    monkeypatch.setattr(sys, "argv", ["xscale", "train", str(config), "--print-config"])
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert "kind: entmax" in out
    assert [line for line in err.splitlines() if "adaptive" in line] == [
        "xscale: warning: model.stack.block.mixer.core: the core 'adaptive' is now called 'entmax'; the old name will "
        "be refused in the next version"
    ]
    assert warnings.showwarning is before
