"""Families of interchangeable parts: a typed registry in which each part declares its traits."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic

from typing_extensions import TypeVar

from xscale.core.config import Config
from xscale.core.errors import ConfigError, nearest

TraitsT = TypeVar("TraitsT")
PartT = TypeVar("PartT", default=Any)
ClassT = TypeVar("ClassT", bound=type)


@dataclass(frozen=True)
class Entry(Generic[TraitsT, PartT]):
    """One registered part."""

    name: str
    part: type[PartT]
    """The class; its `Config` is `part.Config`."""
    traits: TraitsT
    summary: str
    """First line of the part's own docstring, else of its module's: its description and paper."""
    deviations: tuple[str, ...] = ()
    """Sentences on where the part differs from its paper, for `xscale list` and the documentation."""


class Family(Generic[TraitsT, PartT]):
    """A named set of parts that fill the same slot; each declares an instance of the family's traits class."""

    def __init__(self, name: str, traits: type[TraitsT], part: type[PartT] | None = None) -> None:
        """`part` is the base class of the parts, by which a type checker knows what `get`, `of` and `build` return."""
        self.name = name
        self.traits = traits
        self._entries: dict[str, Entry[TraitsT, PartT]] = {}
        self.aliases: dict[str, str] = {}
        """Old name of a part -> its name now."""

    def register(
        self,
        name: str,
        *,
        traits: TraitsT,
        aliases: tuple[str, ...] = (),
        deviations: tuple[str, ...] = (),
    ) -> Callable[[ClassT], ClassT]:
        """Class decorator: register the part under `name`: its file's, or one that its file's docstring mentions.

        `aliases` are old names of the part, which a config may still use; `deviations` say, a sentence each, what the
        part does otherwise than its paper.
        """

        def add(part: ClassT) -> ClassT:
            assert name not in self._entries, f"{self.name} '{name}' is registered twice"
            assert isinstance(traits, self.traits), (
                f"{self.name} '{name}' declares traits of another family"
            )
            if "Config" not in vars(part):
                # Each part owns its config class, so that `kind` can be read off the class alone.
                part.Config = type(  # type: ignore[attr-defined]
                    "Config",
                    (part.Config,),  # type: ignore[attr-defined]
                    {"__qualname__": f"{part.__qualname__}.Config", "__module__": part.__module__},
                )
            config: type[Config] = part.Config  # type: ignore[attr-defined]
            config.kind = name
            config.family = self.name
            self._entries[name] = Entry(name, part, traits, _summary(part), deviations)
            self.aliases |= dict.fromkeys(aliases, name)
            return part

        return add

    def get(self, name: str, path: str = "") -> Entry[TraitsT]:
        """The part called `name`, or once called so; ConfigError with the nearest name when there is none."""
        name = self.aliases.get(name, name)
        if name not in self._entries:
            raise ConfigError(
                path, f"there is no {self.name} of kind '{name}'", nearest(name, self._entries)
            )
        return self._entries[name]

    def of(self, config: Config) -> Entry[TraitsT]:
        """The entry of the part that `config` configures."""
        assert config.kind is not None, f"{type(config).__qualname__} belongs to no registered part"
        return self._entries[config.kind]

    def build(self, config: Config, *args: Any, **kwargs: Any) -> PartT:
        """Construct the part that `config` configures: `Part(config, *args, **kwargs)`."""
        # Parts of one family differ in what they are built from.
        part: Any = self.of(config).part
        built: PartT = part(config, *args, **kwargs)
        return built

    def names(self) -> list[str]:
        return sorted(self._entries)

    def able(self, **wanted: Any) -> list[str]:
        """Names of the parts whose traits have all the given values, for error messages."""
        return [
            name
            for name in self.names()
            if all(
                getattr(self._entries[name].traits, key) == value for key, value in wanted.items()
            )
        ]

    def __iter__(self) -> Iterator[Entry[TraitsT]]:
        return iter(self._entries[name] for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def table(self) -> list[dict[str, Any]]:
        """One plain row per part, with every trait, for `xscale list`."""
        return [
            {"name": entry.name, "summary": entry.summary}
            | dataclasses.asdict(entry.traits)  # type: ignore[call-overload]
            | {"deviations": entry.deviations}
            for entry in self
        ]


def _summary(part: type) -> str:
    import sys

    module = sys.modules.get(part.__module__)
    text = (vars(part).get("__doc__") or (module.__doc__ if module else None) or "").strip()
    return " ".join(text.split("\n\n")[0].split())
