"""Shell completion: recipes, overrides, config keys, run folders, and the launcher's verbs. Nothing imports torch."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from xscale.commands.show.explain import config_keys
from xscale.commands.show.recipes import recipe_named, recipe_names
from xscale.core.compose import Composed, compose_leniently
from xscale.core.config_keys.keys import ConfigKeys, choices, first_sentence, value_text
from xscale.core.config_keys.overrides import below_path
from xscale.core.config_keys.present_keys import PresentKey, root_of, walk
from xscale.core.errors import ConfigError

Candidates = list[tuple[str, str]]
"""Words that the shell offers, each with its help."""
DEPTH = 3
"""Levels of folders in which runs are looked for."""
FOLDERS = 2000
"""At most so many folders are visited: completion must not wait for a large disk."""


def one_of(*words: str) -> Callable[[str], Candidates]:
    """Return a completion that offers these words."""
    return lambda incomplete: [(word, "") for word in words if word.startswith(incomplete)]


def complete_recipe(incomplete: str) -> Candidates:
    """Offer recipes and the YAML files here; nothing for a path, which the shell itself completes."""
    files = sorted(str(file) for file in Path().glob("*.y*ml") if str(file).startswith(incomplete))
    return [
        (name, "")
        for name in [*files, *(name for name in recipe_names() if name.startswith(incomplete))]
    ]


def complete_part_or_recipe(incomplete: str) -> Candidates:
    """Offer the words of `xscale list`: families, tables and names of parts."""
    keys = config_keys()
    families = {family: list(keys.parts(family)) for family in keys.families()}
    words = dict.fromkeys(
        [*families, "recipes", "xformers", *(kind for kinds in families.values() for kind in kinds)]
    )
    return [(word, "") for word in words if word.startswith(incomplete)]


def complete_pattern_or_recipe(incomplete: str) -> Candidates:
    """Offer the kinds of patterns, recipes and the YAML files here."""
    kinds = [kind for kind in config_keys().parts("pattern") if kind.startswith(incomplete)]
    return list(dict.fromkeys([*((kind, "") for kind in kinds), *complete_recipe(incomplete)]))


def complete_key(incomplete: str) -> Candidates:
    """Offer the config keys that begin so, one level at a time."""
    keys = config_keys()
    return _level(keys, incomplete)


def complete_override(context: typer.Context, incomplete: str) -> Candidates:
    """Offer `key=` and `key=value`, with the keys of the parts that the config and earlier overrides choose.

    An entry of a list is offered by its index, and a part also by what it is: `moe.`.
    """
    earlier = [str(word) for word in context.params.get("overrides") or ()]
    return _next_override(
        str(context.params.get("config") or context.params.get("recipe") or ""), earlier, incomplete
    )


def _next_override(config: str, earlier: list[str], incomplete: str) -> Candidates:
    """Return what may follow the config and the words `earlier` of a command line."""
    keys = config_keys()
    data = _composed(config, earlier).data
    # Bash splits words at `=`: then the key is the word before, and its value alone is completed.
    split = (
        earlier[-2:-1]
        if earlier[-1:] == ["="]
        else [word for word in earlier[-1:] if "=" not in word]
    )
    try:
        if split:
            return [
                (value, "")
                for value in _values(keys, data, split[0])
                if value.startswith(incomplete)
            ]
        path, separator, begun = incomplete.partition("=")
        if separator:
            return [
                (f"{path}={value}", "")
                for value in _values(keys, data, path)
                if value.startswith(begun)
            ]
        candidates = _overrides(keys, data, incomplete)
        if len(candidates) == 1 and candidates[0][0].endswith("="):
            # With a second candidate the shell adds no space after the equals sign.
            word, text = candidates[0]
            candidates += [
                (f"{word}{value}", text) for value in _values(keys, data, word[:-1]) or ["null"]
            ]
    except ConfigError:
        # A word that is no key yet, such as one with half an index.
        return []
    return candidates


def of_option(shell: str, option: str, offered: str) -> str:
    """Return what zsh or fish is offered for a word `--option=value`, of which `offered` has the values."""
    if shell == "zsh":
        return f"compset -P '*='; {offered}"
    return "".join(f"{option}{line}\n" for line in offered.splitlines() if line)


def complete_run(incomplete: str) -> Candidates:
    """Offer the run folders at and below the folder of `incomplete`; nothing below a run, where the shell completes."""
    head = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    return [(run, "") for run in sorted(_runs(head)) if run.startswith(incomplete)]


def complete_launch(context: typer.Context, incomplete: str) -> Candidates:
    """Offer the verbs of `xscale launch`, then the options of the verb, its config and overrides, or its run."""
    from xscale_launch.main import verbs

    words, known = _words(context), verbs()
    if not words:
        return [(name, verb.about) for name, verb in known.items() if name.startswith(incomplete)]
    if words[0] not in known:
        return []
    parser = argparse.ArgumentParser()
    known[words[0]].add_arguments(parser)
    return _next_argument(parser, words[1:], incomplete)


def complete_doctor(context: typer.Context, incomplete: str) -> Candidates:
    """Offer the options of `xscale doctor`."""
    from xscale_launch.doctor import argument_parser

    return _next_argument(argument_parser(), _words(context), incomplete)


class LauncherCommand(TyperCommand):
    """A command of the launcher, which parses its words itself: the completion of its one argument is that of all."""

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> Any:  # type: ignore[override]
        (words,) = self.params
        return words.shell_complete(ctx, incomplete)


def _words(context: typer.Context) -> list[str]:
    """The words that are typed, those that bash splits at `=` joined again, except the last."""
    words: list[str] = []
    for word in map(str, context.params.get("words") or ()):
        if len(words) > 1 and words[-1] == "=":
            words[-2:] = [f"{words[-2]}={word}"]
        else:
            words.append(word)
    return words


def _next_argument(
    parser: argparse.ArgumentParser, words: list[str], incomplete: str
) -> Candidates:
    """Return what a parser of the launcher takes after `words`: nothing for a path, which the shell completes."""
    # argparse lists its arguments nowhere else.
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = {name: action for action in actions for name in action.option_strings}
    names = [action.dest for action in actions if not action.option_strings]
    arguments: list[str] = []
    valued: argparse.Action | None = None
    for word in words:
        if valued is not None:
            valued = valued if word == "=" else None
        elif word.startswith("-"):
            valued = options[word] if word in options and options[word].nargs != 0 else None
        else:
            arguments.append(word)
    if valued is not None:
        return [
            (str(choice), "")
            for choice in valued.choices or ()
            if str(choice).startswith(incomplete)
        ]
    if incomplete.startswith("-") or not names:
        return [
            (name, action.help or "")
            for name, action in options.items()
            if name.startswith(incomplete)
        ]
    next_name = names[min(len(arguments), len(names) - 1)]
    if next_name == "overrides":
        return _next_override(arguments[0], arguments[1:], incomplete)
    complete = {"config": complete_recipe, "run": complete_run}.get(next_name)
    return complete(incomplete) if complete is not None and len(arguments) < len(names) else []


def _level(keys: ConfigKeys, incomplete: str) -> Candidates:
    """The keys that begin so, of every kind of part: a section or slot also ends in a dot."""
    *above, begun = incomplete.split(".")
    sections = [keys.root]
    for name in above:
        sections = [
            child for section in sections for child in keys.children(section) if child.name == name
        ]
    candidates: dict[str, str] = {}
    for child in (
        child
        for section in sections
        for child in keys.children(section)
        if child.name.startswith(begun)
    ):
        path, text = ".".join([*above, child.name]), first_sentence(child.sentence)
        has_below = bool(keys.children(child))
        if not has_below or keys.family(child):
            candidates.setdefault(path, text)
        if has_below:
            candidates.setdefault(f"{path}.", text)
    if len(candidates) == 1 and (only := next(iter(candidates))).endswith("."):
        return _level(keys, only)
    return list(candidates.items())


def _overrides(keys: ConfigKeys, data: dict[str, Any], incomplete: str) -> Candidates:
    """The next words of a path: `key=`, `section.`, `list[0].`."""
    above, dot, begun = incomplete.rpartition(".")
    head = f"{above}{dot}"
    present = below_path(keys, data, above)
    candidates = {
        f"{head}{child.key.name}{end}": first_sentence(child.key.sentence)
        for child in present
        for end in _ends(keys, child)
        if f"{child.key.name}{end}".startswith(begun)
    }
    if any(word.is_kind for child in present for word in child.words[-2:-1]) and "kind".startswith(
        begun
    ):
        candidates[f"{head}kind="] = "The part that fills this place."
    if not above and begun:
        words = {
            word for key in walk(keys, root_of(keys, data)) for word in key.words if word.is_kind
        }
        kinds = sorted({name for word in words for name in word.names if name.startswith(begun)})
        candidates |= {f"{kind}.": "Every part of this kind." for kind in kinds}
    if len(candidates) == 1 and (only := next(iter(candidates))).endswith("."):
        return _overrides(keys, data, only)
    return list(candidates.items())


def _ends(keys: ConfigKeys, key: PresentKey) -> list[str]:
    """The signs that may follow the key's name: of a list, each index and the star of all of several entries."""
    has_below = bool(keys.children(key.key))
    if not isinstance(key.value, list | tuple):
        return ["="] * (not has_below or keys.family(key.key) is not None) + ["."] * has_below
    entries = [*range(len(key.value)), *(["*"] if len(key.value) > 1 else [])]
    return ["=", *(f"[{entry}]{'.' if has_below else '='}" for entry in entries)]


def _values(keys: ConfigKeys, data: dict[str, Any], path: str) -> list[str]:
    """Values that a key may take: kinds, choices, or its default as an example."""
    above, _, last = path.rpartition(".")
    name = last.partition("[")[0]
    if last == "kind":
        # A slot is known by its parent, a part by what it is.
        head, _, slot = above.rpartition(".")
        matching = [
            key for key in below_path(keys, data, head) if key.key.name == slot.partition("[")[0]
        ]
    else:
        matching = [key for key in below_path(keys, data, above) if key.key.name == name]
    values: list[str] = []
    for present in matching:
        key = present.key
        family = keys.family(key)
        if family is not None and (last == "kind" or "[]" not in key.path.rpartition(".")[2]):
            values += keys.parts(family)
        values += choices(key.node)
        default = key.node.get("default")
        if isinstance(default, str | int | float) and default != "":
            values.append(value_text(default))
    return list(dict.fromkeys(values))


def _composed(config: str, overrides: list[str]) -> Composed:
    """The config that the command line names so far; empty if it cannot be read."""
    try:
        file = Path(config) if Path(config).is_file() else recipe_named(config)
        return compose_leniently(file, [word for word in overrides if "=" in word.strip("=")])
    except ConfigError:
        return Composed()


def _runs(folder: Path) -> Iterator[str]:
    """Run folders below `folder`: those with a config and checkpoints, metrics or a log."""
    depth_of = {str(folder): 0}
    for visited, (path, below, files) in enumerate(os.walk(folder)):
        depth = depth_of.get(path, DEPTH)
        if "config.yaml" in files and (
            "checkpoints" in below or {"metrics.jsonl", "log.txt"} & set(files)
        ):
            yield path.removeprefix("./")
            below.clear()
        below[:] = (
            sorted(name for name in below if not name.startswith(".")) if depth < DEPTH else []
        )
        depth_of |= {os.path.join(path, name): depth + 1 for name in below}
        if visited >= FOLDERS:
            return
