"""The one writer of YAML: plain data as text that the reader of YAML 1.2 reads as the same data."""

import re
import shlex
from typing import Any

import yaml

PREFIX = "tag:yaml.org,2002:"
SCALARS = {
    # Type -> what a plain scalar of it looks like, and the characters that it begins with.
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    "merge": (r"<<", ["<"]),
}
"""The core schema (YAML 1.2.2, section 10.3.2), and merge keys. The first that matches wins: an int stays an int."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 takes for something else, such as 1e-3, yes or a date."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Unicode line ends are folded away unless they are quoted and escaped; others would take several lines in a flow.
    folded = not text.isascii() and len(text.splitlines()) > text.count("\n")
    style = '"' if folded or "\n" in text else None
    return dumper.represent_scalar(PREFIX + "str", text, style=style)


for _name in ("int", "float"):
    _Dumper.add_implicit_resolver(
        PREFIX + _name, re.compile(f"^(?:{SCALARS[_name][0]})$"), SCALARS[_name][1]
    )
_Dumper.add_representer(str, _represent_text)

DOCUMENT_END = "...\n"
"""PyYAML's end of a document that is one scalar."""


def block_text(value: Any) -> str:
    """Return a value as YAML text of several lines."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def flow_text(value: Any) -> str:
    """Return a value as YAML on one line, as it stands behind a key."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=10_000, allow_unicode=True
    )
    return text.removesuffix(DOCUMENT_END)[:-1]


def override_word(key: str, value: Any) -> str:
    """Return `key=value` as it is typed in a shell: in quotes where a shell would read more than a word in it."""
    return shlex.quote(f"{key}={flow_text(value)}")
