"""What there is to choose from: the families and their parts, as tables."""

import dataclasses
import json
from typing import Any

from xscale.core.errors import ConfigError, nearest
from xscale.core.registry import Family


def families() -> dict[str, Family[Any]]:
    """Every family by its name."""
    from xscale.data.source import SOURCES
    from xscale.data.tokenizer import TOKENIZERS
    from xscale.nn.attention import CORES
    from xscale.nn.ffn import FFNS
    from xscale.nn.mixer import MIXERS
    from xscale.nn.model import MODELS
    from xscale.nn.moe.router import ROUTERS
    from xscale.nn.norm import NORMS
    from xscale.nn.pattern import PATTERNS
    from xscale.nn.position import POSITIONS
    from xscale.objective import OBJECTIVES
    from xscale.optim.optimizer import OPTIMIZERS
    from xscale.optim.schedule import SCHEDULES

    known: list[Family[Any]] = [
        MODELS,
        MIXERS,
        CORES,
        PATTERNS,
        POSITIONS,
        NORMS,
        FFNS,
        ROUTERS,
        OBJECTIVES,
        OPTIMIZERS,
        SCHEDULES,
        SOURCES,
        TOKENIZERS,
    ]
    return {family.name: family for family in known}


def show(name: str | None, *, as_json: bool) -> None:
    """Print one family's parts with their traits, or every family's."""
    known = families()
    if name is not None and name not in known:
        raise ConfigError(name, "there is no such family", nearest(name, known))
    chosen = known if name is None else {name: known[name]}
    if as_json:
        tables = {family: one.table() for family, one in chosen.items()}
        print(json.dumps(tables if name is None else tables[name], indent=2))
        return
    for one in chosen.values():
        _print(one)


def markdown() -> str:
    """Every family with the names of its parts, as the table in the README."""
    rows = [
        f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.names())} |" for family in families().values()
    ]
    return "\n".join(["| family | parts |", "|---|---|", *rows]) + "\n"


def _print(family: Family[Any]) -> None:
    """A part takes a line for what it is and one for what it promises, which any width of terminal can show."""
    traits = [field.name for field in dataclasses.fields(family.traits)]
    print(f"{family.name}: {len(family)} parts")
    wide = max(len(name) for name in family.names())
    for row in family.table():
        print(f"  {row['name']:<{wide}}  {row['summary']}")
        promises = [trait if row[trait] is True else f"{trait}={word(row[trait])}" for trait in traits if row[trait]]
        print(f"  {'':<{wide}}  {'; '.join(promises)}")
    print()


def word(value: Any) -> str:
    """A trait as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
