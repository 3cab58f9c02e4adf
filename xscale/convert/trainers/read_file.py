"""A config of another trainer as data: shell, YAML, TOML, JSON or Python assignments, by the ending of its name."""

import ast
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.convert.trainers.shell_words import shell_options
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import decode_json
from xscale.core.foreign import foreign_errors, reason
from xscale.core.yaml_reader import parse, read_text

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LARGEST_POWER = 64
DEPTH = 100
"""Deepest nesting of sections."""


def read_file(file: Path) -> dict[str, Any]:
    """Return the file's keys with their values, sections joined by dots. ConfigError where it cannot be read."""
    try:
        text = read_text(file)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {reason(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(file), "is not UTF-8 text") from None
    suffix = file.suffix.lower()
    if suffix in (".yaml", ".yml"):
        data = parse(text, str(file))
    elif suffix in READERS:
        with foreign_errors(file, f"is not {READERS[suffix][0]}"):
            data = READERS[suffix][1](text)
    else:
        known = ", ".join((*SHELL, ".yaml", ".toml", ".json", ".py"))
        raise ConfigError(
            str(file), "is no config of another trainer by its ending", f"Give one of {known}."
        )
    if not isinstance(data, dict):
        raise ConfigError(str(file), "has no keys with values")
    flat: dict[str, Any] = {}
    _flatten(data, "", flat, 0)
    return flat


def _flatten(data: dict[Any, Any], above: str, flat: dict[str, Any], depth: int) -> None:
    for name, value in data.items():
        if isinstance(value, dict) and value and depth < DEPTH:
            _flatten(value, f"{above}{name}.", flat, depth + 1)
        else:
            flat[f"{above}{name}"] = value


def python_assignments(text: str) -> dict[str, Any]:
    """Return the names that a Python file assigns numbers, texts, truths or lists to, by its syntax: nothing is run.

    Arithmetic on numbers and on earlier names is computed; a name whose value is anything else is left out. SyntaxError
    if it is no Python.
    """
    names: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        try:
            value = _computed(node.value, names)
        except (ValueError, TypeError, ArithmeticError):
            continue
        names |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return names


def _computed(node: ast.expr | None, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(node.id)
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_computed(item, names) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(_computed(node.operand, names))
    if isinstance(node, ast.BinOp):
        left, right = (_number(_computed(side, names)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow):
            if not 0 <= right <= LARGEST_POWER or abs(left) > LARGEST_POWER:
                raise ValueError("a power")
            return left**right
        if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)
    raise ValueError("no plain value")


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
        raise ValueError("no number")
    return value


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".json": ("JSON", decode_json),
    ".toml": ("TOML", tomllib.loads),
    ".py": ("Python", python_assignments),
    **dict.fromkeys(SHELL, ("a shell script", shell_options)),
}
"""Ending -> the language, and its reader."""
