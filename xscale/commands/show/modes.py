"""The modes in which a variant loads; `python -m xscale.commands.show.modes --write` makes their table."""

import copy
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xscale.core.compose import compose, configs_folder
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.core.yaml_reader import parse
from xscale.nn.model.model import MODELS

if TYPE_CHECKING:
    from xscale.settings.settings import Settings

TABLE = Path(__file__).with_suffix(".yaml")
"""Id -> names of the modes in which the variant loads."""
HEADER = """\
# The modes in which each variant of configs/xformer loads: its stack in a decoder (causal), in an encoder
# (bidirectional), and in the decoder of an encoder-decoder, which attends to the source (cross).
# Made by `python -m xscale.commands.show.modes --write`.
"""
BASES = {"causal": "decoder", "bidirectional": "encoder", "cross": "encoder_decoder"}
"""Mode -> the kind of model that has it, and the file of xformer/base with such a model."""
STACKS = ("stack", "encoder", "decoder")
"""Keys of a model that hold a stack."""
OF_THE_OBJECTIVE = ("mode", "pretraining-objective")
"""Categories of variants that are an objective or a use of a model: theirs are the modes of that model alone."""


@dataclass(frozen=True)
class Modes:
    """Which models a variant can be."""

    causal: bool
    """A decoder."""
    bidirectional: bool
    """An encoder."""
    cross: bool
    """An encoder-decoder, whose decoder attends to the source."""


def modes_of(id: str) -> Modes:
    """The modes of the variant `id`, from the table. KeyError: it has no recipe."""
    names = _table()[id]
    return Modes(**{mode: mode in names for mode in BASES})


@cache
def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = parse(TABLE.read_text(encoding="utf-8"), str(TABLE))
    return table


def found(file: Path) -> list[str]:
    """The modes in which the variant of a recipe loads: the model is made anew and checked, not built."""
    data = compose(file, []).data
    own, about = data["model"]["kind"], data["about"]
    traits = MODELS.get(own).traits
    if own not in BASES.values():
        # A model of its own kind, such as a decoder that writes all tokens at once.
        own_modes = {
            "causal": traits.causal and not traits.source,
            "bidirectional": traits.source or not traits.causal,
            "cross": traits.source,
        }
        return [mode for mode, has in own_modes.items() if has]
    wanted = [mode for mode, kind in BASES.items() if kind == own]
    if about["category"] not in OF_THE_OBJECTIVE or traits.source:
        wanted = list(BASES)
    return [mode for mode in wanted if _loads(data, mode)]


def _loads(data: dict[str, Any], mode: str) -> bool:
    """Whether one of the recipes with this variant in this mode has no problem."""
    from xscale.recipe import Recipe

    for recipe in recipes_in(data, mode):
        try:
            settings: Settings = decode(Recipe, recipe)
        except ConfigError:
            continue
        if not _problems(settings):
            return True
    return False


def _problems(settings: "Settings") -> bool:
    from xscale.requirements.check import unsolved

    return bool(unsolved(settings, 1))


def recipes_in(data: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """Recipes of the variant in `mode`: the variant's stack and keys in another model,

    with an objective and data that it can train on."""
    model, kind = data["model"], BASES[mode]
    if model["kind"] == kind:
        return [data]
    base = compose(configs_folder() / "xformer" / "base" / f"{kind}.yaml", []).data
    stacks = [model[key] for key in STACKS if key in model]
    fields = MODELS.get(kind).part.Config.model_fields
    keys = {key: value for key, value in model.items() if key in fields and key not in STACKS}
    places = [{"stack": stack} for stack in stacks]
    if kind == "encoder_decoder":
        (stack,) = stacks
        # Some stacks belong in the decoder alone, such as one with exits of the model's head.
        places = [
            {"encoder": stack, "decoder": stack},
            {"encoder": base["model"]["encoder"], "decoder": stack},
        ]
    other = {**data, "data": base["data"], "objective": base["objective"]}
    return [copy.deepcopy({**other, "model": {**keys, **place, "kind": kind}}) for place in places]


def drawn() -> str:
    """The text of the table, made anew."""
    from xscale.commands.show import catalogue

    files = {id: catalogue.recipe_file(id) for id in catalogue.ids()}
    lines = [
        f"{id}: [{', '.join(found(file))}]\n" for id, file in files.items() if file is not None
    ]
    return HEADER + "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m xscale.commands.show.modes --write")
    TABLE.write_text(drawn(), encoding="utf-8")
