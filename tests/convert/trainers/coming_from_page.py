"""The tables of docs/how-to/coming-from.md: `python -m tests.convert.trainers.coming_from_page --write` draws them."""

import sys
from pathlib import Path

from xscale.convert.trainers.key_table import TORCHRUN, UNITS, KeyEntry, TrainerTable
from xscale.convert.trainers.to_recipe import TABLES

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"
FIRST, LAST = "<!-- keys: first line -->\n", "<!-- keys: last line -->\n"


def drawn() -> str:
    """Return a section for each trainer: what each can, the keys with one here, and the keys without."""
    return "\n".join(map(_section, TABLES))


def _section(table: TrainerTable) -> str:
    entries = [entry for entry in table.entries if entry not in TORCHRUN]
    names = list(dict.fromkeys(entry.name for entry in entries))
    lines = [
        f"## {table.name}",
        "",
        f"`--from` reads {table.file} ({', '.join(f'`{suffix}`' for suffix in table.suffixes)}).",
        "",
        "| only there | only here |",
        "|---|---|",
        f"| {table.can} | {table.cannot} |",
        "",
        "| there | here | how |",
        "|---|---|---|",
    ]
    absent: list[KeyEntry] = []
    for name in names:
        rows = [(entry, row) for entry in table.named(name) if (row := _here(entry))]
        lines += [f"| `{name}` | {here} | {how} |" for _, (here, how) in rows]
        absent += [] if rows else table.named(name)
    if table.fixed:
        fixed = ", ".join(f"`{key}={_text(value)}`" for key, value in table.fixed.items())
        lines += ["", f"Set for every config: {fixed}."]
    if table.defaults:
        defaults = ", ".join(f"`{key}={_text(value)}`" for key, value in table.defaults.items())
        lines += ["", f"Defaults there, which the recipe has where the file has none: {defaults}."]
    lines += ["", "| no key here | instead |", "|---|---|"]
    lines += [f"| `{entry.name}` | {entry.instead or 'nothing to set'} |" for entry in absent]
    return "\n".join(lines) + "\n"


def _here(entry: KeyEntry) -> tuple[str, str] | None:
    """The cell of the key here, and that of the conversion; None if there is no key."""
    if entry.path:
        others = " and ".join(f"`{name}`" for name in entry.of)
        return f"`{entry.path}`", UNITS[entry.unit].text.format(others)
    cells = [
        f"`{value}`: " + ", ".join(f"`{key}={_text(setting)}`" for key, setting in settings.items())
        for value, settings in entry.values.items()
        if settings
    ]
    return ("; ".join(cells), "") if cells else None


def _text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def on_page(text: str) -> str:
    """Return what stands between the two marks."""
    return text.split(FIRST)[1].split(LAST)[0]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        page = page.replace(FIRST + on_page(page) + LAST, FIRST + drawn() + LAST)
        PAGE.write_text(page, encoding="utf-8")
    print(drawn())
