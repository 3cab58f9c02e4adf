"""Renamed config keys and kinds: the old word still works for one version, with a warning that says the new one."""

import functools
import json
import warnings
from collections.abc import Iterator
from typing import Any, get_args

from xscale.core.errors import ConfigError, Problem


class RenamedWarning(FutureWarning):
    """A config uses a key or a kind under its old name."""


def rename_old_keys(schema: Any, data: Any, origin: dict[str, str]) -> Any:
    """`data` of `schema` with every old key and kind under its new name; warns of each.

    A class lists its old keys in `Config.renamed` and `Config.folded`, a part its old kinds in
    `Family.register(..., aliases=...)`. In `origin` (dotted path -> where the value came from, the latest last) the
    paths are renamed too. If a key is given under both names, the later of the two counts; ConfigError if both came
    from one place.
    """
    messages: list[str] = []
    renamed = _in_schema(schema, data, "", origin, messages)
    for message in messages:
        warnings.warn(message, RenamedWarning, stacklevel=3)
    return renamed


def _in_schema(
    schema: Any, data: Any, path: str, origin: dict[str, str], messages: list[str]
) -> Any:
    if not isinstance(data, dict):
        return data
    result: dict[str, Any] = {}
    for key, value in data.items():
        new = str(schema.renamed.get(key, key))
        if new != key:
            messages.append(
                f"{path}{key} is now called {path}{new}; the old name will be refused in the next version"
            )
            if new in data and not _is_later(f"{path}{key}", f"{path}{new}", origin):
                for known in _paths_below(origin, f"{path}{key}"):
                    del origin[known]
                continue
            _move_origin(origin, f"{path}{key}", f"{path}{new}")
        elif key in result:
            # Its old name was given later, and stands already.
            continue
        result[new] = value
    for old in [key for key in schema.folded if key in result]:
        _fold(schema, result, old, path, origin, messages)
    for key, value in result.items():
        if key in schema.model_fields:
            result[key] = _in_value(_targets(schema, key), value, f"{path}{key}", origin, messages)
    return result


def _fold(
    schema: Any,
    data: dict[str, Any],
    old: str,
    path: str,
    origin: dict[str, str],
    messages: list[str],
) -> None:
    """Put the value of an old key into the key of which it is a part now; where they contradict, the later counts."""
    new, fold = schema.folded[old]
    value = data.pop(old)
    both = fold(value, data.get(new))
    if both is not None:
        data[new] = both
    elif _is_later(f"{path}{old}", f"{path}{new}", origin):
        data[new] = value
    instead = f"{path}{new}={json.dumps(data[new])}".replace('"', "")
    messages.append(
        f"{path}{old} is now {instead}; the old name will be refused in the next version"
    )
    for known in _paths_below(origin, f"{path}{old}"):
        origin.setdefault(f"{path}{new}", origin.pop(known))


@functools.cache
def _targets(schema: Any, key: str) -> tuple[Any, ...]:
    """The config classes and slots that a field may hold."""
    field = schema.model_fields[key]
    return tuple(
        item for item in (*field.metadata, *_annotations(field.annotation)) if _is_target(item)
    )


def _in_value(
    targets: tuple[Any, ...], value: Any, path: str, origin: dict[str, str], messages: list[str]
) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(
            _in_value(targets, item, f"{path}.{number}", origin, messages)
            for number, item in enumerate(value)
        )
    for target in targets:
        family = getattr(target, "family", None)
        if isinstance(target, type):
            value = _in_schema(target, value, f"{path}.", origin, messages)
        elif family is not None:
            value = _in_slot(family, value, path, origin, messages)
    return value


def _in_slot(
    family: Any, value: Any, path: str, origin: dict[str, str], messages: list[str]
) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else value
    if not isinstance(kind, str):
        return value
    if (new := family.aliases.get(kind, kind)) != kind:
        messages.append(
            f"{path}: the {family.name} '{kind}' is now called '{new}'; the old name will be refused in the "
            "next version"
        )
        value = {**value, "kind": new} if isinstance(value, dict) else new
    if isinstance(value, dict) and new in family:
        fields = {key: item for key, item in value.items() if key != "kind"}
        return {
            "kind": new,
            **_in_schema(family.get(new).part.Config, fields, f"{path}.", origin, messages),
        }
    return value


def _is_later(old: str, new: str, origin: dict[str, str]) -> bool:
    """Whether the value at path `old` was given after the one at `new`; ConfigError if nothing tells."""
    olds, news = _paths_below(origin, old), _paths_below(origin, new)
    if not olds or not news or origin[olds[-1]] == origin[news[-1]]:
        what = f"given beside '{new.rpartition('.')[2]}', which is its new name"
        raise ConfigError([Problem(old, what, f"Give only {new}.")])
    order = list(origin)
    return order.index(olds[-1]) > order.index(news[-1])


def _paths_below(origin: dict[str, str], path: str) -> list[str]:
    return [known for known in origin if known == path or known.startswith(f"{path}.")]


def _move_origin(origin: dict[str, str], old: str, new: str) -> None:
    for path in _paths_below(origin, new):
        del origin[path]
    for path in _paths_below(origin, old):
        origin[new + path[len(old) :]] = origin.pop(path)


def _annotations(annotation: Any) -> Iterator[Any]:
    """The annotation and all that is nested in it."""
    yield annotation
    yield from getattr(annotation, "__metadata__", ())
    for argument in get_args(annotation):
        yield from _annotations(argument)


def _is_target(item: Any) -> bool:
    """Whether an annotation names a config: a `Config` class, or a `Slot` of a family."""
    if isinstance(item, type):
        return (
            hasattr(item, "renamed")
            and hasattr(item, "model_fields")
            and item.__dict__.get("kind") is None
            and (getattr(item, "family", None) is None)
        )
    return hasattr(getattr(item, "family", None), "aliases")
