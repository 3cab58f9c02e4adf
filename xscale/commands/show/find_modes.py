"""The modes in which a variant loads; `python -m xscale.commands.show.find_modes --write` makes their table."""

import copy
import sys
from pathlib import Path
from typing import Any

from xscale.commands.show import catalogue
from xscale.commands.show.modes import TABLE
from xscale.core.compose import compose, configs_folder
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.model.model import MODELS
from xscale.recipe import Recipe

HEADER = """\
# The modes in which each variant of configs/xformer loads: its stack in a decoder (causal), in an encoder
# (bidirectional), and in the decoder of an encoder-decoder, which attends to the source (cross).
# Made by `python -m xscale.commands.show.find_modes --write`.
"""
BASES = {"causal": "decoder", "bidirectional": "encoder", "cross": "encoder_decoder"}
"""Mode -> the kind of model that has it, and the file of xformer/base with such a model."""
STACKS = ("stack", "encoder", "decoder")
"""Keys of a model that hold a stack."""
OF_THE_OBJECTIVE = ("mode", "pretraining-objective")
"""Categories of variants that are an objective or a use of a model: theirs are the modes of that model alone."""


def found(file: Path) -> list[str]:
    """The modes in which the variant of a recipe loads: the model is made anew and checked, not built."""
    data = compose(file, []).data
    kind, category = data["model"]["kind"], data["about"]["category"]
    traits = MODELS.get(kind).traits
    if kind not in BASES.values():
        # A model of its own kind, such as a decoder that writes all tokens at once.
        by_traits = {
            "causal": traits.causal and not traits.source,
            "bidirectional": traits.source or not traits.causal,
            "cross": traits.source,
        }
        return [mode for mode, has in by_traits.items() if has]
    wanted = [mode for mode, has_it in BASES.items() if has_it == kind]
    if category not in OF_THE_OBJECTIVE or traits.source:
        wanted = list(BASES)
    return [mode for mode in wanted if _loads(data, mode)]


def _loads(data: dict[str, Any], mode: str) -> bool:
    """Whether one of the recipes with this variant in this mode has no problem."""
    return any(_is_valid(recipe) for recipe in recipes_in(data, mode))


def _is_valid(recipe: dict[str, Any]) -> bool:
    try:
        return decode(Recipe, recipe).is_valid()
    except ConfigError:
        return False


def recipes_in(data: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """Return recipes of the variant in `mode`: its stack and keys in another model, with an objective that fits."""
    model, kind = data["model"], BASES[mode]
    if model["kind"] == kind:
        return [data]
    base = compose(configs_folder() / "xformer" / "base" / f"{kind}.yaml", []).data
    stacks = [model[key] for key in STACKS if key in model]
    fields = MODELS.get(kind).part.Config.model_fields
    keys = {key: value for key, value in model.items() if key in fields and key not in STACKS}
    placed = [{"stack": stack} for stack in stacks]
    if kind == "encoder_decoder":
        (stack,) = stacks
        # Some stacks belong in the decoder alone, such as one with exits of the model's head.
        placed = [
            {"encoder": stack, "decoder": stack},
            {"encoder": base["model"]["encoder"], "decoder": stack},
        ]
    other = {**data, "data": base["data"], "objective": base["objective"]}
    return [copy.deepcopy({**other, "model": {**keys, **named, "kind": kind}}) for named in placed]


def drawn() -> str:
    """The text of the table, made anew."""
    files = {id: catalogue.recipe_file(id) for id in catalogue.ids()}
    lines = [
        f"{id}: [{', '.join(found(file))}]\n" for id, file in files.items() if file is not None
    ]
    return HEADER + "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m xscale.commands.show.find_modes --write")
    TABLE.write_text(drawn(), encoding="utf-8")
