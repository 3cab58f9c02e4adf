"""From keys of another trainer to a recipe, by the trainer's table; nothing is left out without being named."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.convert.trainers.deepspeed_keys import DEEPSPEED
from xscale.convert.trainers.key_table import TORCHRUN, UNITS, KeyEntry, TrainerTable, UnfitError
from xscale.convert.trainers.megatron_keys import MEGATRON
from xscale.convert.trainers.nano_keys import NANOCHAT, NANOGPT
from xscale.convert.trainers.shell_words import ShellValue
from xscale.convert.trainers.torchtitan_keys import TORCHTITAN
from xscale.convert.trainers.transformers_keys import TRANSFORMERS
from xscale.core.errors import ConfigError
from xscale.core.key_words.others_words import meant_by, way_of

TABLES = (MEGATRON, TORCHTITAN, DEEPSPEED, TRANSFORMERS, NANOGPT, NANOCHAT)
FEWEST = 2
"""Known keys by which a file is taken for a trainer's config."""
BLOCK = "model.stack.block"
TEXT = {
    "data.source.kind": "text",
    "data.source.paths": [],
    "data.tokenizer.kind": "sentencepiece",
    "objective.kind": "causal",
}
"""Keys of every recipe, which the user fills in."""


@dataclass(frozen=True)
class OmittedKey:
    """A key of the other trainer's file that the recipe does not have."""

    key: str
    value: Any
    why: str
    """Clause on what is done here, or that no counterpart is known."""


@dataclass
class Converted:
    """Settings that a file of another trainer gives."""

    table: TrainerTable
    settings: dict[str, Any]
    """Dotted key here -> value."""
    left_out: list[OmittedKey]


def table_of(file: Path, data: Mapping[str, Any]) -> TrainerTable:
    """Return the trainer most of whose keys the file has; ConfigError, with what was looked for, where none fits."""
    suffix = file.suffix.lower()
    tables = [table for table in TABLES if suffix in table.suffixes]
    counts = [_known_keys(table, data) for table in tables]
    if max(counts, default=0) < FEWEST:
        kinds = "; ".join(f"{table.file} ({', '.join(_first_keys(table))} ...)" for table in TABLES)
        raise ConfigError(
            str(file), "is no config of another trainer that is known", f"Looked for: {kinds}."
        )
    return tables[counts.index(max(counts))]


def _known_keys(table: TrainerTable, data: Mapping[str, Any]) -> int:
    known = {entry.name for entry in table.entries} - {entry.name for entry in TORCHRUN}
    return len(known & {table.key_name(key) for key in data})


def _first_keys(table: TrainerTable) -> list[str]:
    return list(dict.fromkeys(entry.name for entry in table.entries if entry.path))[:3]


def convert(table: TrainerTable, data: Mapping[str, Any]) -> Converted:
    """Return the settings here of the trainer's keys `data`, its own defaults included, and the keys left out."""
    known = {table.key_name(key): value for key, value in data.items() if _is_set(value)}
    settings: dict[str, Any] = dict(table.fixed)
    left_out: dict[str, OmittedKey] = {}
    taken: set[str] = set()
    used: set[str] = set()
    # Kinds first, because other keys mean something with some kinds alone; defaults before what is given.
    for has_needs in (False, True):
        for values in (table.defaults, known):
            for entry in table.entries:
                if entry.name not in values or bool(entry.needs) != has_needs:
                    continue
                all_values = {**table.defaults, **known, entry.name: values[entry.name]}
                try:
                    settings |= _settings_of(entry, all_values, settings)
                    used |= {*entry.of}
                    taken |= {entry.name} if values is known else set()
                except UnfitError as error:
                    left_out[entry.name] = OmittedKey(
                        entry.name, all_values[entry.name], str(error)
                    )
    _derive(table, settings)
    for key, value in known.items():
        paths = [entry.path for entry in table.named(key) if entry.path]
        if not table.named(key):
            left_out[key] = OmittedKey(key, value, _advice(key))
        elif (
            paths and all(path.startswith("moe.") for path in paths) and not _has_experts(settings)
        ):
            left_out[key] = OmittedKey(key, value, "has no effect without experts")
            taken.discard(key)
    missing = [item for key, item in left_out.items() if key in known and key not in taken | used]
    return Converted(table, settings, missing)


def _derive(table: TrainerTable, settings: dict[str, Any]) -> None:
    """Set the keys that follow from others, where the file does not set them."""
    for derived in table.derived:
        values = [settings.get(key) for key in derived.of]
        is_open = derived.path not in settings and None not in values
        if is_open and _are_met(derived.needs, settings):
            # The check of the recipe refuses a value that it cannot follow from.
            with suppress(UnfitError):
                settings[derived.path] = UNITS[derived.unit].convert(values[0], values[1:])


def _has_experts(settings: Mapping[str, Any]) -> bool:
    return isinstance(settings.get("moe.experts"), int)


def _is_set(value: Any) -> bool:
    return value is not None and value != "auto" and not isinstance(value, ShellValue)


def _settings_of(
    entry: KeyEntry, all_values: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys here that an entry sets; UnfitError with the reason where it sets none."""
    value = all_values[entry.name]
    if not entry.path and not entry.values:
        raise UnfitError(entry.instead)
    if not _are_met(entry.needs, settings):
        key, allowed = next(
            (key, allowed)
            for key, allowed in entry.needs.items()
            if settings.get(key) not in allowed
        )
        raise UnfitError(f"has no effect without {key}={' or '.join(map(str, allowed))}")
    if entry.values:
        spelled = str(value).lower()
        if spelled not in entry.values:
            raise UnfitError(
                f"this value has no counterpart; these have one: {', '.join(entry.values)}"
            )
        return dict(entry.values[spelled])
    missing = [name for name in entry.of if name not in all_values]
    if missing:
        raise UnfitError(
            f"{entry.path} follows from it and {', '.join(missing)}, which is not given"
        )
    try:
        converted = UNITS[entry.unit].convert(value, [all_values[name] for name in entry.of])
    except UnfitError as error:
        raise UnfitError(f"{error}; here it is {entry.path}") from None
    return {entry.path: converted}


def _are_met(needs: Mapping[str, tuple[Any, ...]], settings: Mapping[str, Any]) -> bool:
    return all(settings.get(key) in allowed for key, allowed in needs.items())


def _advice(key: str) -> str:
    """Return what an unknown key may be here."""
    word = key.rpartition(".")[2]
    if way := way_of(word):
        return way[0].lower() + way[1:].rstrip(".?")
    return f"{meant_by(word)}, perhaps" if meant_by(word) else "no counterpart is known"


def unset_keys(data: Mapping[str, Any], table: TrainerTable) -> list[OmittedKey]:
    """List the keys whose values the file does not have: shell variables, and values that the trainer fills in."""
    unset: list[OmittedKey] = []
    for dotted, value in data.items():
        name = table.key_name(dotted)
        path = next((entry.path for entry in table.named(name) if entry.path), "")
        where = f"; set {path}" if path else ""
        if isinstance(value, ShellValue):
            unset.append(OmittedKey(name, value.text, f"only the shell knows its value{where}"))
        elif value == "auto":
            unset.append(OmittedKey(name, value, f"the trainer fills it in{where}"))
    return unset


def recipe_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe with these settings; with experts, the ffn is what each expert is."""
    flat = {**TEXT, **settings}
    has_experts = _has_experts(flat)
    if "moe.shared.hidden" in flat:
        flat |= {
            f"moe.shared.{key}": flat[f"{BLOCK}.ffn.{key}"]
            for key in ("kind", "gate")
            if f"{BLOCK}.ffn.{key}" in flat
        }
    data: dict[str, Any] = {}
    for path, value in flat.items():
        if path.startswith("moe."):
            if not has_experts:
                continue
            path = f"{BLOCK}.ffn.{path.removeprefix('moe.')}"
        elif has_experts and path.startswith(f"{BLOCK}.ffn."):
            path = f"{BLOCK}.ffn.expert.{path.removeprefix(f'{BLOCK}.ffn.')}"
        _put(data, path.split("."), value)
    if has_experts:
        _put(data, [*BLOCK.split("."), "ffn", "kind"], "moe")
    return data


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        held = data.setdefault(name, {})
        if not isinstance(held, dict):
            # A part that was named by its kind alone.
            held = data[name] = {"kind": held}
        data = held
    if isinstance(value, Mapping):
        data.setdefault(path[-1], {}).update(value)
    else:
        data[path[-1]] = value
