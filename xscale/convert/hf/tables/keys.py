"""Entries of a table of config keys: what stands in a section of a model's config for a value of config.json.

A table is a section as a config file has it, in which an entry stands in the place of a value. An import reads the
table: each entry becomes its value. An export writes it: each entry puts the values of its place into config.json. In a
block, a place has one value for each layer, and all layers are written together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xscale.convert.hf.architecture import Data, ModelSizes, Requirements

FLOATS = ("dropout", "scale", "eps", "init_std", "base", "jitter", "factor")
"""Keys of xscale that are numbers: files have integers, and 0 or null for 0.0."""
NULLABLE = ("clamp_value", "soft_cap", "logit_soft_cap")
"""Those that may be null."""
FLAGS = ("bias", "output_bias", "normalise", "scale_embeddings", "tied")
"""Keys of xscale that are true or false: files have null, or nothing, for false."""


class KeysRead(dict[str, Any]):
    """A config.json that remembers which of its keys were read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@dataclass(frozen=True)
class Reading:
    """An import: config.json, and the layer whose block is read."""

    data: Data
    require: Requirements
    layer: int = 0


@dataclass(frozen=True)
class Writing:
    """An export: config.json as far as it is written."""

    config: Any
    """The model's config."""
    sizes: ModelSizes
    require: Requirements
    data: Data = field(default_factory=dict)

    def put(self, key: str, value: Any, path: str) -> None:
        """Write a key; record a problem if it has another value already."""
        if key in self.data and self.data[key] != value:
            what = f"{self.require.architecture} has one {key}, not {self.data[key]} and {value}"
            self.require.reject(path, what, f"{self.data[key]} here too would map.")
        self.data[key] = value


class KeyMapping:
    """A value of xscale, for which a table says how it stands in config.json."""

    def read(self, reading: Reading, name: str) -> Any:
        """Return the value of xscale's key `name`."""
        raise NotImplementedError

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        """Put the values of a place, one for each layer, into config.json; `path` is the place."""
        raise NotImplementedError

    def misfit(self, value: Any) -> int:
        """Return in how many places the value is none that `read` returns."""
        return 0

    def names(self) -> set[str]:
        """Return the keys of config.json that are honoured, whether or not an import reads them."""
        return set()


Table = Any
"""A section of mappings, values and entries."""


def read_table(table: Table, reading: Reading, name: str = "") -> Any:
    """Return the section of the config that a table becomes."""
    if isinstance(table, KeyMapping):
        return table.read(reading, name)
    if isinstance(table, Mapping):
        return {key: read_table(value, reading, key) for key, value in table.items()}
    return table


def write_table(table: Table, values: Sequence[Any], path: str, writing: Writing) -> None:
    """Put what a table has of a section into config.json, and record a problem for each value that it does not have.

    `values` are the section's, one for each layer.
    """
    if not values:
        return
    if isinstance(table, KeyMapping):
        table.write(values, path, writing)
        return
    expected = _name(table)
    fits = [writing.require.one_of(path, name, expected) for name in distinct(map(_name, values))]
    if not isinstance(table, Mapping) or not all(fits):
        return
    for key, inner in table.items():
        if key != "kind":
            inner_path = f"{path}.{key}" if path else key
            write_table(inner, [value[key] for value in values], inner_path, writing)


def misfits(table: Table, value: Any) -> int:
    """Return in how many places a value is none that the table can be."""
    if isinstance(table, KeyMapping):
        return table.misfit(value)
    if _name(table) != _name(value):
        return 1
    if not isinstance(table, Mapping):
        return 0
    return sum(misfits(inner, value[key]) for key, inner in table.items() if key != "kind")


def names_in(table: Table) -> set[str]:
    """Return the keys of config.json that a table honours."""
    if isinstance(table, KeyMapping):
        return table.names()
    inner = table.values() if isinstance(table, Mapping) else ()
    return set().union(*map(names_in, inner))


def _name(value: Any) -> Any:
    """Return the kind of a part, or another value as it is; a section without a kind is None of them."""
    return value.get("kind", "") if isinstance(value, Mapping) else value


def distinct(values: Any) -> list[Any]:
    """Return the values without repetitions, in their order."""
    unlike: list[Any] = []
    for value in values:
        if value not in unlike:
            unlike.append(value)
    return unlike


def one_value(values: Sequence[Any], path: str, writing: Writing) -> Any:
    """Return the value that all layers have; record a problem if they differ."""
    if any(value != values[0] for value in values):
        what = f"{writing.require.architecture} has one {path.rpartition('.')[2]} for all layers"
        fix = f"Layers with {path.rpartition('.')[2]}={values[0]} would map."
        writing.require.reject("model.stack.rules", what, fix)
    return values[0]


@dataclass(frozen=True)
class SameKey(KeyMapping):
    """A key of config.json with the same value."""

    name: str
    missing: Any = None
    """Value of xscale where the file has null or nothing; "=KEY": that of another key."""

    def read(self, reading: Reading, name: str) -> Any:
        value = reading.data.get(self.name)
        if value is None and isinstance(self.missing, str) and self.missing.startswith("="):
            value = reading.data.get(self.missing[1:])
        elif value is None:
            value = self.missing
        if name in FLAGS:
            return bool(value)
        if name in NULLABLE:
            return None if value is None else float(value)
        return float(value or 0) if name in FLOATS else value

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        writing.put(self.name, one_value(values, path, writing), path)

    def names(self) -> set[str]:
        return {self.name}


@dataclass(frozen=True)
class Initial(KeyMapping):
    """A value that an import begins with, and of which an export says nothing."""

    value: Any

    def read(self, reading: Reading, name: str) -> Any:
        return self.value

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        """Write nothing: where the value matters, the comparison of the written config finds it."""

    def misfit(self, value: Any) -> int:
        return int(_name(value) != self.value)


@dataclass(frozen=True)
class Computed(KeyMapping):
    """A value that is computed, by a function for each direction."""

    from_hf: Callable[[Reading], Any]
    to_hf: Callable[[Any, Writing], Data]
    """From the value of all layers, to keys of config.json."""
    keys: tuple[str, ...] = ()
    """The keys of config.json that it reads."""

    def read(self, reading: Reading, name: str) -> Any:
        return self.from_hf(reading)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        for key, value in self.to_hf(one_value(values, path, writing), writing).items():
            writing.put(key, value, path)

    def names(self) -> set[str]:
        return set(self.keys)


@dataclass(frozen=True)
class ByKey(KeyMapping):
    """One of several sections, by the value of a key of config.json."""

    key: str
    sections: Mapping[Any, Table]
    missing: Any = None
    """Value of a key that the file does not have."""

    def read(self, reading: Reading, name: str) -> Any:
        value = reading.data.get(self.key, self.missing)
        reading.require.one_of(self.key, value, *self.sections)
        chosen = self.sections.get(value, next(iter(self.sections.values())))
        return read_table(chosen, reading, name)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        key = nearest_section(self.sections, values)
        writing.put(self.key, key, path)
        write_table(self.sections[key], values, path, writing)

    def misfit(self, value: Any) -> int:
        return min(misfits(section, value) for section in self.sections.values())

    def names(self) -> set[str]:
        return {self.key, *names_in(self.sections)}


def nearest_section(sections: Mapping[Any, Table], values: Sequence[Any]) -> Any:
    """Return the key of the section that the values fit best, the first of several."""
    return min(sections, key=lambda key: sum(misfits(sections[key], value) for value in values))


@dataclass(frozen=True)
class LayerKinds:
    """The kind of each layer, by a name, as config.json says it."""

    from_hf: Callable[[Data], Sequence[Any]]
    to_hf: Callable[[Sequence[Any]], Data]

    @classmethod
    def listed(cls, key: str) -> "LayerKinds":
        """Return the kinds that a list in config.json has."""
        return cls(lambda data: data[key] or (), lambda kinds: {key: list(kinds)})


@dataclass(frozen=True)
class ByLayer(KeyMapping):
    """One of several sections, by the kind of the layer."""

    kinds: LayerKinds
    sections: Mapping[Any, Table]
    path: str = "layer_types"
    """Key of config.json that problems of a kind name."""

    def read(self, reading: Reading, name: str) -> Any:
        kind = self.kinds.from_hf(reading.data)[reading.layer]
        reading.require.one_of(self.path, kind, *self.sections)
        chosen = self.sections.get(kind, next(iter(self.sections.values())))
        return read_table(chosen, reading, name)

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        kinds = [nearest_section(self.sections, [value]) for value in values]
        for key, value in self.kinds.to_hf(kinds).items():
            writing.put(key, value, path)
        for kind, section in self.sections.items():
            of_kind = [value for value, name in zip(values, kinds, strict=True) if name == kind]
            write_table(section, of_kind, path, writing)

    def misfit(self, value: Any) -> int:
        return min(misfits(section, value) for section in self.sections.values())

    def names(self) -> set[str]:
        return {self.path, *names_in(self.sections)}


@dataclass(frozen=True)
class Renamed(KeyMapping):
    """A value that has another name in config.json."""

    key: str
    values: Mapping[Any, Any]
    """Value in config.json -> that of xscale; an export writes the first of several."""

    def read(self, reading: Reading, name: str) -> Any:
        value = reading.data.get(self.key)
        reading.require.one_of(self.key, value, *self.values)
        return self.values.get(value, next(iter(self.values.values())))

    def write(self, values: Sequence[Any], path: str, writing: Writing) -> None:
        names: dict[Any, Any] = {}
        for hf_value, value in self.values.items():
            names.setdefault(value, hf_value)
        value = one_value(values, path, writing)
        if writing.require.one_of(path, value, *names):
            writing.put(self.key, names[value], path)

    def misfit(self, value: Any) -> int:
        return int(value not in self.values.values())

    def names(self) -> set[str]:
        return {self.key}


def merged(table: Table, changes: Table) -> Table:
    """Return a table with changes: sections of the same kind are merged, other values replaced."""
    if not isinstance(table, Mapping) or not isinstance(changes, Mapping):
        return changes
    if "kind" in changes and changes["kind"] != table.get("kind"):
        return changes
    return {**table, **{key: merged(table.get(key), value) for key, value in changes.items()}}
