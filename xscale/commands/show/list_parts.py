"""`xscale list`: tables of the families and their parts, and the catalogue of variants."""

import dataclasses
import json
from typing import Any

from xscale.commands.show import catalogue, recipes
from xscale.conformance.families import FAMILIES, families
from xscale.core.errors import ConfigError
from xscale.core.registry import Family


def show(
    name: str | None, *, as_json: bool, tokens: int | None = None, kind: str | None = None
) -> None:
    """Print the parts of one family or of all with their traits; for patterns also the density over `tokens`.

    `recipes` prints those of runs, `xformers` the catalogue of variants, or those of one `kind`; any other name, what
    it is.
    """
    if tokens is not None and (name != "pattern" or tokens < 1):
        raise ConfigError(
            "--tokens", "only patterns have a density", "Use xscale list pattern --tokens N."
        )
    if kind is not None and name != "xformers":
        raise ConfigError(
            "--kind", "only variants have a kind", "Use xscale list xformers --kind KIND."
        )
    if name == "recipes":
        recipes.show(as_json=as_json)
        return
    if name == "xformers":
        catalogue.show(kind, as_json=as_json)
        return
    if name is not None and name not in FAMILIES:
        catalogue.show_word(name, _what_else(name), as_json=as_json)
        return
    known = families()
    chosen = known if name is None else {name: known[name]}
    tables = {family: parts.table() for family, parts in chosen.items()}
    if tokens is not None:
        tables["pattern"] = [row | _density(row["name"], tokens) for row in tables["pattern"]]
    if as_json:
        print(json.dumps(tables if name is None else tables[name], indent=2))
        return
    for family, parts in chosen.items():
        _print(parts, tables[family])


OTHERS_LISTS = {
    **dict.fromkeys(
        ("experts", "mixtures", "mlp"), "Write `xscale list ffn`, or `xscale list moe`."
    ),
    **dict.fromkeys(
        ("datasets", "dataset", "data", "corpora"), "Sources of text are `xscale list source`."
    ),
    **dict.fromkeys(("loss", "losses", "tasks"), "Losses belong to objectives: `list objective`."),
    **dict.fromkeys(("flash", "sdpa", "kernels", "operators"), "`xscale bench ops` has operators."),
    **dict.fromkeys(("schedulers", "lr"), "Write `xscale list schedule`."),
    **dict.fromkeys(("keys", "settings", "options"), "Keys are shown by `xscale explain`."),
    **dict.fromkeys(("commands", "help"), "`xscale --help` shows the commands."),
    **dict.fromkeys(("devices", "gpus", "nodes"), "`xscale doctor` checks this machine."),
    **dict.fromkeys(("runs", "checkpoints"), "Runs are folders: `xscale checkpoint ls RUN`."),
    "plugins": "A part of your own is checked by `xscale check-part FILE`.",
}
"""A word that other programs list -> a sentence on what shows it here."""


def _what_else(word: str) -> str:
    """A sentence on a word that no list has: a recipe, a config key, or what other programs call so; else empty."""
    from xscale.commands.show.explain import config_keys

    if known := recipes.what_else(word) or OTHERS_LISTS.get(word.lower(), ""):
        return known
    is_key = "." in word and config_keys().find(word)
    return f"It is a config key: `xscale explain {word}`." if is_key else ""


def markdown() -> str:
    """Return the table of the families and their parts for the README."""
    rows = [
        f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.names())} |"
        for family in families().values()
    ]
    return "\n".join(["| family | parts |", "|---|---|", *rows]) + "\n"


def _density(name: str, tokens: int) -> dict[str, Any]:
    """Return a pattern's density over `tokens` with default settings and blocks of 64, and the time per layout."""
    import time

    from xscale.nn.pattern.pattern import PATTERNS, pattern_density

    entry = PATTERNS.get(name)
    densities: dict[str, Any] = {}
    began = time.perf_counter()
    for way, causal in (("causal", True), ("both_ways", False)):
        if entry.traits.causal if causal else entry.traits.bidirectional:
            densities[f"density_{way}"] = round(
                pattern_density(entry.part.Config(), tokens, causal, heads=8), 6
            )
    return densities | {"build_seconds": round((time.perf_counter() - began) / len(densities), 4)}


def _print(family: Family[Any], rows: list[dict[str, Any]]) -> None:
    """Print a summary line and a line of traits per part, which fit any terminal width."""
    traits = [field.name for field in dataclasses.fields(family.traits)]
    print(f"{family.name}: {len(family)} parts")
    name_width = max(len(name) for name in family.names())
    for row in rows:
        print(f"  {row['name']:<{name_width}}  {row['summary']}")
        shown = [
            trait if row[trait] is True else f"{trait}={cell(row[trait])}"
            for trait in traits
            if row[trait]
        ]
        print(f"  {'':<{name_width}}  {'; '.join(shown)}")
        for sentence in row["deviations"]:
            print(f"  {'':<{name_width}}  differs from the paper: {sentence}")
        directions = {"density_causal": "causal", "density_both_ways": "bidirectional"}
        densities = [
            f"density {row[key]:.2%} {direction}"
            for key, direction in directions.items()
            if key in row
        ]
        if densities:
            print(
                f"  {'':<{name_width}}  {', '.join(densities)}; layout built in {row['build_seconds'] * 1e3:.1f} ms"
            )
    print()


def cell(value: Any) -> str:
    """Format a trait for a table."""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
