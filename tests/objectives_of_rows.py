"""The table of variants and objectives; `python -m tests.objectives_of_rows --write` makes its page anew."""

import copy
import sys
from pathlib import Path
from typing import Any

from xscale.commands.show import catalogue, find_modes
from xscale.core import compose
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.model.model import MODELS
from xscale.objective.objective import OBJECTIVES
from xscale.recipe import Recipe
from xscale.requirements.check import unsolved

Data = dict[str, Any]
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "objectives.md"
HEAD = """\
# Variants and objectives

Which variant trains with which objective, by loading it: its recipe with `use: objective/NAME`, and data of the
objective's kind. `yes`: as it stands. `decoder`, `encoder`, `pair`: where its stack is put into such a model. A number
refers to the reason below the tables, which `xscale check` says too, with what would work.

Made by `python -m tests.objectives_of_rows --write`.
"""
KINDS = {"decoder": "causal", "encoder": "bidirectional", "encoder_decoder": "cross"}
WORDS = {"decoder": "decoder", "encoder": "encoder", "encoder_decoder": "pair"}
FILES = compose.configs_folder()


def page() -> str:
    """The text of the page."""
    reasons: dict[str, int] = {}
    names = OBJECTIVES.names()
    lines = [HEAD]
    kinds: dict[str, list[str]] = {}
    for id in catalogue.ids():
        if (file := catalogue.recipe_file(id)) is not None:
            kinds.setdefault(compose.parse_file(file)["about"]["category"], []).append(id)
    for kind, ids in kinds.items():
        lines += [f"## {kind}", "", f"| | {' | '.join(names)} |", "|---|" + ":-:|" * len(names)]
        lines += [line(id, reasons) for id in ids]
        lines.append("")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "## Reasons", "", *notes]) + "\n"


def line(id: str, reasons: dict[str, int]) -> str:
    """The line of one variant; a new reason gets the next number."""
    answers = {name: answer(id, name) for name in OBJECTIVES.names()}
    cells = [text if trains else str(reasons.setdefault(text, len(reasons) + 1)) for trains, text in answers.values()]
    return f"| `{id}` | {' | '.join(cells)} |"


def answer(id: str, objective: str) -> tuple[bool, str]:
    """Whether the variant trains with the objective, and as what model, else the first reason against it."""
    file = catalogue.recipe_file(id)
    assert file is not None
    data = compose.compose(file, []).data
    own = data["model"]["kind"]
    needed = added_by(objective).get("model", {}).get("kind", own)
    if needed != own:
        return False, f"'{objective}' needs the model '{needed}'"
    others = suiting(objective) if own in KINDS else []
    # What is said against a model of the kind that the objective reads tells more than that this is another kind.
    first = [own] if own in others or not others else []
    reason = ""
    for kind in dict.fromkeys((*first, *others)):
        candidates = [data] if kind == own else find_modes.recipes_in(data, KINDS[kind])
        for candidate in candidates:
            problems = problems_of(with_objective(candidate, objective))
            if not problems:
                return True, "yes" if kind == own else WORDS[kind]
            reason = reason or problems[0]
    return False, reason


def suiting(objective: str) -> list[str]:
    """Kinds of models that have what the objective's traits ask for."""
    traits = OBJECTIVES.get(objective).traits
    if traits.source:
        return ["encoder_decoder"]
    return [kind for kind in ("decoder", "encoder") if traits.causal in (None, MODELS.get(kind).traits.causal)]


def added_by(objective: str) -> Data:
    """The file of the objective in configs/objective."""
    file = FILES / "objective" / f"{objective}.yaml"
    return compose.parse_file(file) if file.is_file() else {"objective": {"kind": objective}}


def with_objective(data: Data, name: str) -> Data:
    """The recipe with the objective, what its file in configs/objective adds, and data of its kind."""
    traits = OBJECTIVES.get(name).traits
    own = data["objective"] if isinstance(data["objective"], str) else data["objective"]["kind"]
    if name == own:
        return data
    data = copy.deepcopy(data)
    # Heads that the variant's own objective trains go with it.
    for key in added_by(own).get("model", {}).keys() - {"kind"}:
        data["model"].pop(key, None)
    added = added_by(name)
    given = added["objective"]
    data["objective"] = {"kind": given} if isinstance(given, str) else given
    source: Data = {"kind": "stdlib"}
    if traits.records == "pairs":
        source = {"kind": "pairs", "paths": ["x"]}
    if traits.labels is not None:
        source = {"kind": "labelled", "paths": ["x"], "labels": traits.labels}
    if name in ("classify", "regress") and MODELS.get(data["model"]["kind"]).traits.causal:
        data["objective"]["pool"] = "last"
    kept = {key: value for key, value in data["data"].items() if key in ("tokenizer", "sequence_length")}
    data["data"] = {**kept, "source": source, "cross_documents": traits.records == "text", **added.get("data", {})}
    data["model"] |= {key: value for key, value in added.get("model", {}).items() if key != "kind"}
    return data


def problems_of(data: Data) -> list[str]:
    try:
        return [problem.what for problem in unsolved(decode(Recipe, data), 1)]
    except ConfigError as error:
        return [problem.what for problem in error.problems]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python -m tests.objectives_of_rows --write")
    PAGE.write_text(page(), encoding="utf-8")
