"""YAML text of a config to plain data: floats as YAML 1.2 reads them, and duplicate keys are refused."""

import re
from typing import Any

import yaml

from xscale.core.errors import ConfigError, Problem


class ConfigLoader(yaml.SafeLoader):
    """Reads floats as YAML 1.2 does, so that 1e-3 is a number, and lists duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[Problem] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        mark = node.start_mark
        for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
            line, what = f"{self.name}:{mark.line + 1}", f"the key '{key}' is given twice"
            self.duplicates.append(Problem(line, what, "Keep one of them."))
        return super().construct_mapping(node, deep=deep)


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# The first resolver that matches wins; an int must stay an int.
for _first, _resolvers in ConfigLoader.yaml_implicit_resolvers.items():
    _resolvers.sort(key=lambda resolver: resolver[0] == "tag:yaml.org,2002:float")


if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(CParser, ConfigLoader):
        """`ConfigLoader` on libyaml's parser, which takes a sixth of the time and explains mistakes less well."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)
            self.duplicates = []

else:
    _FastLoader = ConfigLoader  # type: ignore[misc,assignment]


def parse(text: str, name: str) -> Any:
    """Parse YAML text to plain data; a ConfigError names the line, or those of all duplicate keys."""
    try:
        try:
            data, duplicates = _load(_FastLoader(text), name)
        except yaml.YAMLError:
            data, duplicates = _load(ConfigLoader(text), name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(line, f"this is not YAML: {getattr(error, 'problem', error)}") from None
    if duplicates:
        raise ConfigError(duplicates)
    return data


def _load(loader: ConfigLoader, name: str) -> tuple[Any, list[Problem]]:
    loader.name = name
    try:
        return loader.get_single_data(), loader.duplicates
    finally:
        loader.dispose()
