"""Compose files and overrides into one plain mapping with the origin of each value: YAML, `use:`, dotted overrides.

Precedence: schema default < `use` left to right < the file itself < the command line.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from xscale.core.config_keys.override_path import (
    KeyPath,
    Target,
    is_plain,
    nested,
    own_list,
    parse_path,
    path_text,
    set_absent,
)
from xscale.core.errors import ConfigError, Problem, nearest
from xscale.core.yaml_reader import DEPTH, parse, read_text
from xscale.core.yaml_writer import block_text, flow_text

FILES = 500
"""Most files of a config; files that each use the next one twice would else take for ever."""
SCHEMA = "recipe.schema.json"
"""Name of the JSON schema of a recipe, among the configs."""
COMMAND_LINE = "command line"
"""Origin of the values of overrides."""
NO_OVERRIDE = "an override is written key=value"
"""The fault of a word that sets no key."""
APART = re.compile(r"([a-z_]+(?:\.[\w\[\]*]+)+)(?: ?[:=])? ([^ =]+)")
"""A key and its value, typed as two or three words."""
OTHERS_PATH = re.compile(r"(?:[+~]{0,2})([a-z_]+(?:[:/][a-z_]+)+)|\+{1,2}([a-z_.]+)")
"""A path as other configs have it: `train/steps`, `train:steps`, `+train.steps`."""
PACKAGE = Path(__file__).resolve().parents[1]


def configs_folder() -> Path:
    """The folder of the configs that come with xscale: within the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


@dataclass
class Composed:
    """A merged config with the origin of each leaf: dotted path -> file or command line, the latest last."""

    data: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    """Every file that was read, or looked for and not found: while none changes, the result does not."""
    parsed: int = 0
    """Number of files that were read, a file that is used twice counted twice."""
    problems: list[Problem] = field(default_factory=list)
    """Files and overrides that were left out because they cannot be read."""
    replaced: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Dotted path -> the mapping of the files that an override of its `kind`, without other keys, replaced."""
    from_files: dict[str, Any] = field(default_factory=dict)
    """The config without the overrides."""
    resolved: dict[str, list[str]] = field(default_factory=dict)
    """Path of an override of all entries of a list, or by what a part is -> the paths of the keys that it set."""
    fitted: dict[str, str] = field(default_factory=dict)
    """Path of a value that was fitted to an override of another key -> a sentence that says how."""


def parse_file(file: Path) -> dict[str, Any]:
    """Parse one config file, without the files that it uses; ConfigError when it is missing or not a mapping."""
    try:
        data = parse(read_text(file), str(file))
    except OSError as error:
        near = _neighbours(file)
        raise ConfigError(str(file), f"cannot read the config: {error.strerror}", near) from None
    except UnicodeDecodeError:
        raise ConfigError(str(file), "the config is not UTF-8 text") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(str(file), "a config is a mapping of keys to values")
    return data or {}


def compose(file: Path, overrides: list[str]) -> Composed:
    """Read `file`, the files it uses, and the overrides (`a.b=value`, value in YAML); ConfigError for any problem."""
    composed = compose_leniently(file, overrides)
    if composed.problems:
        raise ConfigError(composed.problems)
    return composed


def compose_leniently(file: Path, overrides: list[str]) -> Composed:
    """Do what `compose` does without the overrides that cannot be read, which `problems` of the result lists.

    ConfigError, with every problem, when a file cannot be read: nobody knows which keys are valid without it.
    """
    return _compose(partial(_add_file, file=file, above=()), overrides)


def compose_mapping(data: dict[str, Any], overrides: list[str]) -> Composed:
    """Compose a config that is no file: a mapping, the files that its `use` names, and the overrides.

    `use` is looked for in the working directory and above, and among the configs that come with xscale. ConfigError
    for any problem.
    """
    composed = _compose(
        partial(_add_data, data=deepcopy(data), file=Path("recipe").absolute(), above=()), overrides
    )
    if composed.problems:
        raise ConfigError(composed.problems)
    return composed


def _compose(add: Callable[[Composed], None], overrides: list[str]) -> Composed:
    composed = Composed()
    try:
        add(composed)
    except ConfigError as error:
        composed.problems += error.problems
    has_all_files = not composed.problems
    composed.from_files = deepcopy(composed.data)
    for override in overrides:
        try:
            _add_override(composed, override)
        except ConfigError as error:
            composed.problems += error.problems
    if any(problem.what == NO_OVERRIDE for problem in composed.problems):
        composed.problems = _written_apart(overrides, composed.problems)
    if not has_all_files:
        raise ConfigError(composed.problems)
    return composed


def _written_apart(overrides: list[str], problems: list[Problem]) -> list[Problem]:
    """Join the problems of an override that was typed as several words, `train.steps 20`, to one with the advice."""
    for start, count in product(range(len(overrides)), (3, 2)):
        words = overrides[start : start + count]
        match = APART.fullmatch(" ".join(words))
        if match is not None and len(words) == count:
            kept = [problem for problem in problems if problem.path not in words]
            fix = f"Write it as one word: {match[1]}={match[2]}."
            return [*kept, Problem(" ".join(words), NO_OVERRIDE, fix)]
    return problems


def _add_override(composed: Composed, override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path or any(not part for part in path.split(".")):
        raise ConfigError(override, NO_OVERRIDE, "For example train.steps=20.")
    if dotted := OTHERS_PATH.fullmatch(path):
        key = re.sub("[:/]", ".", dotted[1] or dotted[2])
        raise ConfigError(override, "a key is written with dots", f"Write {key}={text}.")
    if path.count(".") >= DEPTH:
        raise ConfigError(f"override {path[:40]}...", f"it is nested more than {DEPTH} deep")
    value: Any = parse(text, f"override {override}")
    targets = _targets(composed.data, path)
    for target in targets:
        for above, default in target.defaults:
            set_absent(composed.data, above, default)
        _set(composed, target.path, deepcopy(value))
    segments = parse_path(path)
    if any(None in segment.entries for segment in segments) or any(
        t.path[0] != segments[0].name for t in targets
    ):
        composed.resolved[path] = [path_text(target.path) for target in targets]


def _targets(data: dict[str, Any], path: str) -> list[Target]:
    """The keys that an override sets. Only one of a list, of a part or of a default needs the schema, which is long."""
    segments = parse_path(path)
    if is_plain(data, segments):
        return [Target(tuple(segment.name for segment in segments))]
    # pydantic takes a while to import, and most overrides do without.
    from xscale.core.config_keys.keys import read_keys
    from xscale.core.config_keys.overrides import resolve

    return resolve(read_keys(configs_folder() / SCHEMA), data, path)


def _set(composed: Composed, path: KeyPath, value: Any) -> None:
    """Set the value at a path, in entries of lists too, each of which may stand in the data only once."""
    indices = [number for number, step in enumerate(path) if isinstance(step, int)]
    if not indices:
        _merge(composed, composed.data, nested(path, value), "", COMMAND_LINE)
        return
    entries = own_list(composed.data, path[: indices[-1]])
    index = path[indices[-1]]
    assert isinstance(index, int)
    # The entry as the value of a key, so that parts are replaced and values merged as anywhere.
    below = {str(index): entries[index]}
    prefix = ".".join(map(str, path[: indices[-1]]))
    _merge(
        composed,
        below,
        {str(index): nested(path[indices[-1] + 1 :], value)},
        f"{prefix}.",
        COMMAND_LINE,
    )
    entries[index] = below[str(index)]


def _add_file(composed: Composed, file: Path, above: tuple[Path, ...]) -> None:
    if file in above:
        chain = " -> ".join(map(str, (*above, file)))
        raise ConfigError(str(file), f"`use` is circular: {chain}", "Remove one of them.")
    if composed.parsed >= FILES:
        raise ConfigError(
            str(file),
            f"the config uses more than {FILES} files, each counted as often as it is used",
        )
    composed.parsed += 1
    composed.files.append(file.absolute())
    _add_data(composed, parse_file(file), file, above)


def _add_data(
    composed: Composed, data: dict[str, Any], file: Path, above: tuple[Path, ...]
) -> None:
    """Add the content of `file`, after the files that it uses."""
    use = data.pop("use", None) or []
    names = [use] if isinstance(use, str) else use
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{file}: use",
            "must be a list of config names",
            "For example use: [model/switch_tiny, data/stdlib].",
        )
    for name in names:
        try:
            _add_file(composed, _find(composed, name, file), (*above, file))
        except ConfigError as error:
            composed.problems += error.problems
    _merge(composed, composed.data, data, "", str(file))


def _find(composed: Composed, name: str, user: Path) -> Path:
    """`use: [model/tiny]` means `configs/model/tiny.yaml`: looked for beside the file, in the folders above it, and
    last among the configs that come with xscale.
    """
    wanted = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if wanted.is_absolute():
        return wanted
    folders = list(user.absolute().parents)
    for folder in folders:
        for root in (folder, folder / "configs"):
            if (root / wanted).is_file():
                return root / wanted
            composed.files.append(root / wanted)
    if (configs_folder() / wanted).is_file():
        return configs_folder() / wanted
    raise ConfigError(
        f"{user}: use",
        f"'{name}' is in none of the folders above this file, and no config of xscale",
        _neighbours(folders[0].parent / wanted)
        or "Write it as a path below configs/, for example model/switch_tiny.",
    )


def _neighbours(file: Path) -> str:
    if not file.parent.is_dir():
        return ""
    return nearest(file.name, [path.name for path in file.parent.glob("*.y*ml")])


def _merge(
    composed: Composed, below: dict[str, Any], above: dict[str, Any], path: str, origin: str
) -> None:
    """Merge `above` into `below` in place. A mapping of another `kind` replaces the old one; so do lists."""
    for key, value in above.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}{key} ({origin})", "config keys must be strings")
        old = below.get(key)
        key_path = f"{path}{key}"
        if key == "kind" and old is not None and old != value:
            # Another part does not know the keys of the old one.
            _forget(composed, path.rstrip("."), below)
            below.clear()
        if isinstance(old, str) and isinstance(value, dict) and "kind" not in value:
            old = below[key] = {"kind": old}
        if (
            isinstance(value, dict)
            and isinstance(old, dict)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            _merge(composed, old, value, f"{key_path}.", origin)
        elif isinstance(value, dict):
            if origin == COMMAND_LINE and isinstance(old, dict) and value.keys() == {"kind"}:
                composed.replaced.setdefault(key_path, old)
            _forget(composed, key_path, old)
            below[key] = {}
            _merge(composed, below[key], value, f"{key_path}.", origin)
        else:
            _forget(composed, key_path, old)
            below[key] = list(value) if isinstance(value, list | tuple) else value
            composed.origin[key_path] = origin


def leaves(data: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf of `data`, the mapping at `path`."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def _forget(composed: Composed, path: str, old: Any) -> None:
    """Forget the origins of `old`, the value at `path`."""
    composed.origin.pop(path, None)
    for key, value in old.items() if isinstance(old, dict) else ():
        _forget(composed, f"{path}.{key}", value)


def dump(data: dict[str, Any], origin: dict[str, str] | None = None) -> str:
    """Write YAML text; with `origin`, each leaf has a comment with the origin of its value."""
    if origin is None:
        return block_text(data)
    return "\n".join(_annotated(data, origin, "", 0)) + "\n"


def _annotated(data: dict[str, Any], origin: dict[str, str], path: str, depth: int) -> list[str]:
    lines = []
    for key, value in data.items():
        key_path = f"{path}{key}"
        if isinstance(value, dict) and value:
            lines.append(f"{'  ' * depth}{key}:")
            lines += _annotated(value, origin, f"{key_path}.", depth + 1)
            continue
        first = f"{key}: {flow_text(value)}"
        source = origin.get(
            key_path, next((origin[up] for up in _above(key_path) if up in origin), "default")
        )
        inside = {
            where: up.removeprefix(f"{key_path}.")
            for up, where in origin.items()
            if up.startswith(f"{key_path}.")
        }
        source += "".join(f"; {entry}: {where}" for where, entry in inside.items())
        lines.append(f"{'  ' * depth}{first:<{max(1, 56 - 2 * depth)}}  # {source}")
    return lines


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
