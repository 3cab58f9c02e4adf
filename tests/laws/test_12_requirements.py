"""Law 12: what a part requires is data. A refusal gives choices, which the solver tries, and writes none of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, files, plant

PACKAGES = frozenset({"nn", "objective", "optim", "parallel", "distill", "settings", "requirements"})
"""Packages whose problems are those of a recipe."""
VALUE = re.compile(r"\b[a-z_]+=[\w{\[]")
"""A key with its value, in a sentence."""


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the literal texts of an expression, with `{}` for what is computed."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in inner.values)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _function_of(file: File, place: ast.Assign | ast.Call) -> ast.FunctionDef | None:
    """Return the innermost function around a node."""
    around = [
        node
        for node in file.nodes
        if isinstance(node, ast.FunctionDef) and node.lineno <= place.lineno <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno) if around else None


def _raises(file: File, place: ast.Assign) -> bool:
    """Whether the sentence is for an error of a run that has begun, where no recipe is there to try it in."""
    function = _function_of(file, place)
    return function is not None and "ConfigError(" in ast.unparse(function)


def violations(root: Path) -> dict[str, str]:
    """Problems of a recipe without choices, and those whose sentence has a value for a key."""
    found = {}
    for file in files(root, ("xscale",)):
        if file.package not in PACKAGES:
            continue
        for node in file.nodes:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fix":
                if _raises(file, node):
                    continue
                fix, has_choices = node.value, True
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                third = node.args[2] if len(node.args) > 2 else given.get("fix")
                if third is None:
                    continue
                fix, has_choices = third, "choices" in given
            else:
                continue
            function = _function_of(file, node)
            name = "" if function is None else function.name
            if not has_choices:
                found[file.at(node, name)] = "the advice is a sentence that nobody has tried: give `choices`"
            elif any(VALUE.search(text) for text in _texts(fix) if " " in text):
                found[file.at(node, name)] = "the sentence has a value for a key: make it one of `choices`"
    return found


def test_advice_is_choices() -> None:
    assert unbent("advice", violations(ROOT)) == []


@pytest.mark.parametrize(
    ("text", "is_bent"),
    [
        ("def check():\n    return Problem('a', 'is wrong', 'Take 3.')", True),
        ("def check():\n    return Problem('a', 'is wrong', fix='Take 3.')", True),
        ("def check():\n    return Problem('a', 'is wrong', 'Or take b=3.', choices=take(3))", True),
        ("def check():\n    return Problem('a', 'is wrong', f'Or take b={c}.', choices=take(3))", True),
        ("def check():\n    fix = f'Or take b={c}.'\n    return Problem('a', 'is wrong', fix, choices=take(3))", True),
        ("def check():\n    return Problem('a', 'is wrong', 'Or start more processes.', choices=take(3))", False),
        ("def check():\n    return Problem('a', 'is wrong', choices=take(3))", False),
        ("def check():\n    return Problem('a', 'is wrong')", False),
    ],
)
def test_a_sentence_is_found(tmp_path: Path, text: str, is_bent: bool) -> None:
    plant(tmp_path, xscale__nn__bad=text)
    assert bool(violations(tmp_path)) == is_bent
