"""`xscale init`: a recipe as one file that uses no other, with a comment above each key."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xscale.commands.show.explain import config_keys
from xscale.commands.show.recipes import YAML, heading, recipe_named
from xscale.core.compose import SCHEMA, compose, configs_folder
from xscale.core.config_keys.keys import ConfigKeys, Key, first_sentence, wrapped
from xscale.core.errors import ConfigError
from xscale.core.files.file_errors import disk_reason, disk_remedy
from xscale.core.files.file_safety import remove_file
from xscale.core.yaml_writer import flow_text

COMMENT_WIDTH = 110
FEW = 8
"""At most so many kinds are written beside a key."""


def init(name: str, out: Path | None) -> None:
    """Write the recipe `name` as one commented file that uses no other, and say how to start it.

    ConfigError for an unknown name, and if the file exists or cannot be written.
    """
    recipe = recipe_named(name)
    target = recipe_target(out, recipe.stem)
    write_new(target, file_text(recipe, f"runs/{target.stem}"))
    print(f"wrote {target}, the recipe '{recipe.stem}' with all that it uses. Edit it, then:")
    print_next_commands(target)


def recipe_target(out: Path | None, stem: str) -> Path:
    """Return the YAML file to write, `stem` with its ending if `out` is None; ConfigError for another ending."""
    target = Path(f"{stem}.yaml") if out is None else out
    if target.suffix not in YAML:
        raise ConfigError(
            "--out", f"must be a .yaml file, got {str(target)!r}", f"Give --out {target}.yaml."
        )
    return target


def print_next_commands(target: Path) -> None:
    """Print the commands that follow once a recipe is written."""
    print(f"  xscale plan {target} --check      find mistakes without starting")
    print(f"  xscale train {target}")
    print("  xscale explain KEY      what a key means, such as train.batch_size")


def file_text(recipe: Path, run_folder: str) -> str:
    """Return the text that `init` writes: the composed recipe, with a comment above each key, and a run folder."""
    data = {key: value for key, value in compose(recipe, []).data.items() if key != "about"}
    # That of the recipe may have a run already, which the file would resume.
    data["run"] = {**data.get("run", {}), "dir": run_folder}
    opening = [
        heading(recipe),
        f"Written by `xscale init {recipe.stem}`: every key of the recipe with its meaning. `xscale explain KEY` "
        "has its type, default and choices; `xscale train FILE key=value` overrides it for one run.",
    ]
    return commented_text(data, opening)


def commented_text(data: dict[str, Any], opening: list[str]) -> str:
    """Return a recipe as YAML text: the paragraphs `opening`, and each key below a comment with its sentence."""
    keys = config_keys()
    missing = [
        key.path for key in keys.children(keys.root) if key.path not in data and key.path != "about"
    ]
    lines = [
        f"# yaml-language-server: $schema={(configs_folder() / SCHEMA).as_uri()}",
        *(line for paragraph in opening for line in wrapped(paragraph, "# ", COMMENT_WIDTH)),
    ]
    footer = wrapped(
        f"Sections at their defaults: {', '.join(missing)}. `xscale explain SECTION` lists the keys of one.",
        "# ",
        COMMENT_WIDTH,
    )
    return "\n".join([*lines, *_commented(keys, [keys.root], data, ""), "", *footer]) + "\n"


def _commented(
    keys: ConfigKeys, above: list[Key], data: dict[str, Any], indent: str
) -> Iterator[str]:
    """Lines of a section, with the sentence of each key; `above` are the keys that may hold it."""
    kind = data.get("kind")
    for name, value in data.items():
        if not indent:
            yield ""
        if name == "kind":
            yield from (f"{indent}# {line}" for line in _kinds(keys, above))
            yield f"{indent}kind: {value}"
            continue
        matching = [
            child
            for key in above
            for child in keys.children(key, kind if keys.family(key) else None)
            if name in (child.name, *child.old_names)
        ]
        sentence = first_sentence(matching[0].sentence) if matching else ""
        yield from wrapped(sentence, f"{indent}# ", COMMENT_WIDTH)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _commented(keys, matching, value, f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{indent}{name}:"
            for item in value:
                yield from _commented_item(keys, matching, item, f"{indent}  ")
        else:
            yield f"{indent}{name}: {flow_text(value)}"


def _kinds(keys: ConfigKeys, above: list[Key]) -> Iterator[str]:
    """A line on the kinds that may fill a slot: all of them, or the command that lists them if they are many."""
    for family in dict.fromkeys(
        family for key in above if (family := keys.family(key)) is not None
    ):
        kinds = list(keys.parts(family))
        yield (
            f"One of {', '.join(kinds)}."
            if len(kinds) <= FEW
            else f"One of {len(kinds)}: `xscale list {family}`."
        )


def _commented_item(keys: ConfigKeys, above: list[Key], item: Any, indent: str) -> list[str]:
    """Lines of an entry of a list: the dash stands before its first key, below that key's comment."""
    if not isinstance(item, dict):
        return [f"{indent}- {flow_text(item)}"]
    lines = list(_commented(keys, above, item, f"{indent}  "))
    first = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
    lines[first] = f"{indent}- {lines[first].lstrip()}"
    return lines


def write_new(target: Path, text: str) -> None:
    """Write a file that must not exist yet, in one step: a killed process leaves no half of it."""
    part = target.with_name(f".{os.getpid()}.part")
    try:
        if target.exists() or target.is_symlink():
            raise FileExistsError
        file = part.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
            # A link, unlike a rename, fails if somebody wrote the target meanwhile.
            os.link(part, target)
        finally:
            remove_file(part.parent, part.name)
    except FileExistsError:
        fix = "Choose another with --out FILE.yaml."
        raise ConfigError(str(target), "the file exists, and is not overwritten", fix) from None
    except OSError as error:
        raise ConfigError(
            str(target),
            f"cannot be written: {disk_reason(error, target)}",
            f"{disk_remedy(error, target)}, or choose another with --out.",
        ) from None
