"""The catalogue of Transformer variants: `xscale list xformers`, and what a name is if it is no family."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xscale.core.compose import configs_folder
from xscale.core.config import Config, Slot, decode
from xscale.core.errors import ConfigError, nearest
from xscale.core.yaml_reader import parse

if TYPE_CHECKING:
    from xscale.recipe import Recipe
    from xscale.settings.settings import About

ROWS = Path(__file__).with_suffix(".yaml")
"""Every row in order: the id of one that has a recipe, all fields of one that is missing."""


def recipe_file(id: str) -> Path | None:
    """The recipe of the row `id`; None for an unknown or missing row. Imports no torch."""
    file = configs_folder() / "xformer" / f"{id}.yaml"
    return file if id in ids() and file.is_file() else None


def variant_named(word: str) -> Path:
    """The recipe of the id `word`, or of the one id that begins with it.

    ConfigError for an unknown or missing variant, and if several ids begin so. Imports no torch.
    """
    like = ids_like(word)
    recipes = {id: file for id in like if (file := recipe_file(id)) is not None}
    if not like:
        raise ConfigError(word, "there is no variant of this name", nearest(word, ids()))
    if not recipes:
        fix = "`xscale list xformers` shows the variants that have a recipe."
        raise ConfigError(
            word, f"the variant {like[0]} is missing: {_entries()[like[0]]['why'].rstrip('.')}", fix
        )
    if len(recipes) > 1:
        raise ConfigError(
            word, "several recipes have names that begin so", f"Give one of: {', '.join(recipes)}."
        )
    return next(iter(recipes.values()))


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Id -> the fields of a missing row, or no fields, in the order of the catalogue."""
    items = parse(ROWS.read_text(encoding="utf-8"), str(ROWS))
    return {
        item if isinstance(item, str) else item["id"]: {} if isinstance(item, str) else item
        for item in items
    }


def ids() -> list[str]:
    """The id of each row, in the order of the catalogue."""
    return list(_entries())


@dataclass(frozen=True)
class Row:
    """One variant of the catalogue, as `xscale list xformers --json` prints it."""

    id: str
    name: str
    kind: str
    status: str
    """works, partly (`why` says what is absent), or missing (`why` says what it would take)."""
    why: str
    recipe: str | None
    """Path of the recipe in a checkout; `xscale train ID` finds it anywhere."""
    parts: tuple[str, ...]
    """`family:name` of each part of the model, and of the objective, optimizer and schedule."""
    causal: bool | None
    """Whether a decoder of it loads; null: the row is missing."""
    bidirectional: bool | None
    """Whether an encoder does."""
    cross: bool | None
    """Whether an encoder-decoder does, whose decoder attends from one sequence to another."""
    deviations: tuple[str, ...]
    """Differences from the paper, in the recipe and in its parts."""
    paper: str
    year: int
    summary: str


def row(id: str) -> Row:
    """The row of that id; ConfigError for an unknown id and for a recipe that cannot be decoded."""
    from xscale.recipe import read
    from xscale.settings.settings import About

    if id not in _entries():
        raise ConfigError(id, "this is no row of the catalogue", nearest(id, ids()))
    file = recipe_file(id)
    if file is None:
        return _row(decode(About, _entries()[id]), "missing", None)
    recipe, _ = read(file, [])
    assert recipe.about is not None, f"{file} has no section about"
    return _row(recipe.about, "partly" if recipe.about.why else "works", recipe)


def rows(kind: str | None = None) -> list[Row]:
    """All rows, or those of one kind; ConfigError for an unknown kind."""
    table = [row(id) for id in ids()]
    kinds = dict.fromkeys(entry.kind for entry in table)
    if kind is not None and kind not in kinds:
        raise ConfigError("--kind", f"there is no kind '{kind}' of variant", nearest(kind, kinds))
    return [entry for entry in table if kind in (None, entry.kind)]


def _row(about: "About", status: str, recipe: "Recipe | None") -> Row:
    from xscale.commands.show.modes import modes_of
    from xscale.conformance.families import family_named

    parts = [] if recipe is None else parts_of(recipe)
    entries = [(family, family_named(family).get(name)) for family, name in parts]
    modes = None if recipe is None else modes_of(about.id)
    return Row(
        id=about.id,
        name=about.name,
        kind=about.category,
        status=status,
        why=about.why,
        recipe=None if recipe is None else f"configs/xformer/{about.id}.yaml",
        parts=tuple(f"{family}:{name}" for family, name in parts),
        causal=None if modes is None else modes.causal,
        bidirectional=None if modes is None else modes.bidirectional,
        cross=None if modes is None else modes.cross,
        deviations=(
            *about.deviations,
            *(
                f"{family} {entry.name}: {text}"
                for family, entry in entries
                for text in entry.deviations
            ),
        ),
        paper=about.paper,
        year=about.year,
        summary=about.summary,
    )


def parts_of(recipe: "Recipe") -> list[tuple[str, str]]:
    """(family, name) of each part of the model, objective, optimizer and schedule, in the order of the config."""
    sections = (recipe.model, recipe.objective, recipe.optimizer, recipe.schedule)
    return list(dict.fromkeys(part for section in sections for part in _parts(section)))


def _parts(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    if isinstance(value, Config):
        if value.family is not None and value.kind is not None:
            yield value.family, value.kind
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name))


def show(kind: str | None, *, as_json: bool) -> None:
    """Print the rows of one kind or of all: a table, or a JSON list with one object for each row."""
    table = rows(kind)
    if as_json:
        print(json.dumps([asdict(entry) for entry in table], indent=2))
        return
    counts = {
        status: sum(entry.status == status for entry in table)
        for status in ("works", "partly", "missing")
    }
    print(
        f"xformers: {len(table)} variants ({', '.join(f'{status}: {n}' for status, n in counts.items())})"
    )
    for name in dict.fromkeys(entry.kind for entry in table):
        print(f"\n{name}")
        for entry in table:
            if entry.kind == name:
                print(f"  {entry.id}: {entry.status}. {_details(entry)}")


def _details(entry: Row) -> str:
    lines = [f"{entry.summary} {entry.paper}."]
    if entry.recipe is not None:
        flags = [name for name in ("causal", "bidirectional", "cross") if getattr(entry, name)]
        lines.append(f"{entry.recipe}; {', '.join(flags)}; {', '.join(entry.parts)}")
    if entry.why:
        lines.append(f"{'absent' if entry.recipe else 'why'}: {entry.why}")
    lines += [f"differs from the paper: {text}" for text in entry.deviations]
    return "\n    ".join(lines)


NEAR = 0.7
"""Names that are less alike than this are no misspelling of one another, as `finished` is none of `fixed`."""


def show_word(word: str, what_else: str, *, as_json: bool) -> None:
    """Print what `word` is among the parts and the catalogue's rows.

    ConfigError if it is neither, with the sentence `what_else` on what it is otherwise, or the nearest name.
    """
    from xscale.conformance.families import families

    known = families()
    parts = {name: family.get(word) for name, family in known.items() if word in family}
    variants = [row(id) for id in ids_like(word)]
    if not parts and not variants:
        names = {
            *known,
            "recipes",
            "xformers",
            *ids(),
            *(name for family in known.values() for name in family.names()),
        }
        close = get_close_matches(word, sorted(names), n=1, cutoff=NEAR)
        fix = what_else or (
            f"Did you mean '{close[0]}'?"
            if close
            else f"Families: {', '.join(known)}; variants: xformers."
        )
        raise ConfigError(word, "this is no family, part or variant", fix)
    if as_json:
        tables = {
            name: [item for item in known[name].table() if item["name"] == word] for name in parts
        }
        print(json.dumps({**tables, "xformers": [asdict(entry) for entry in variants]}, indent=2))
        return
    print(where(word))
    for name, part in parts.items():
        print(f"  {name} {part.name}: {part.summary}")
        for text in part.deviations:
            print(f"    differs from the paper: {text}")
    for entry in variants:
        print(f"  {entry.id}: {entry.status}. {_details(entry)}")


def where(word: str) -> str:
    """A sentence on what `word` is and which recipe has it; empty for an unknown word."""
    from xscale.conformance.families import families

    homes = [f"a {name}{_owner(name)}" for name, family in families().items() if word in family]
    like = ids_like(word)
    recipes = [f"configs/xformer/{id}.yaml" for id in like if recipe_file(id) is not None]
    missing = [
        f"{id} is missing: {_entries()[id]['why']}" for id in like if recipe_file(id) is None
    ]
    clauses = [f"{word} is {' and '.join(homes)}"] if homes else []
    if recipes:
        label = "recipe" if len(recipes) == 1 else "recipes"
        clauses.append(
            f"{label}: {', '.join(recipes)}"
            if homes
            else f"{word} has the {label} {', '.join(recipes)}"
        )
    return "; ".join([*clauses, *missing])


def ids_like(word: str) -> list[str]:
    """Ids of the rows that `word` names: the id itself, else those that begin with it (reformer: reformer-lsh)."""
    plain = word.lower().replace("_", "-")
    return [plain] if plain in ids() else [id for id in ids() if id.startswith(f"{plain}-")]


def _owner(family: str) -> str:
    """The part whose config chooses among the family, such as ` of the core block_sparse`; empty for a section."""
    from xscale.conformance.families import families

    owners = [
        f"{name} {entry.name}"
        for name, members in families().items()
        if name != family
        for entry in members
        if any(_is_slot(field, family) for field in entry.part.Config.model_fields.values())
    ]
    return f" of the {owners[0]}" if len(owners) == 1 else ""


def _is_slot(field: Any, family: str) -> bool:
    """Whether a part of the family fills the field, itself, as an option or as a member of a tuple."""
    nested = [
        item
        for argument in get_args(field.annotation)
        for item in getattr(argument, "__metadata__", ())
    ]
    return any(
        isinstance(item, Slot) and item.family.name == family for item in (*field.metadata, *nested)
    )
