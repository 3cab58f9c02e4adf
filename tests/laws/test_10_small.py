"""Law 10: small. Lengths, names, one opening sentence a file, and nothing that only this machine understands."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import CODE, ROOT, File, files, identifiers, plant, words

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 150
VAGUE_FILES = frozenset(("utils", "util", "common", "helpers", "helper", "misc", "base", "impl", "manager", "stuff"))
VAGUE_WORDS = frozenset(("manager", "handler", "base", "impl"))
Law = Callable[[Path], dict[str, str]]
EVERYWHERE = (*CODE, "tests")
TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".cfg", ".json", ".html")
PRIVATE = re.compile(r"(?<![\w.])/(?:root|work)/")
"""Absolute paths under a superuser's home or a work folder, which other machines do not have."""


def sizes(root: Path) -> dict[str, str]:
    violations = {}
    for file in files(root, EVERYWHERE):
        lines = len(file.text.splitlines())
        if lines > FILE_LINES:
            violations[file.path] = f"{lines} lines, more than {FILE_LINES}"
        limit = KERNEL_LINES if file.path.startswith("kernels/") else FUNCTION_LINES
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > limit:
                    violations[f"{file.path}:{node.name}"] = f"{length} lines, more than {limit}"
    return violations


def names(root: Path) -> dict[str, str]:
    violations = {}
    for file in files(root, EVERYWHERE):
        if file.parts[-1] in VAGUE_FILES:
            violations[file.path] = f"'{file.parts[-1]}' says nothing of what is in it"
    for file in files(root):
        for node in file.nodes:
            if isinstance(node, ast.ClassDef) and VAGUE_WORDS & set(words(node.name)):
                violations[file.at(node, node.name)] = (
                    "a class is named by what it is, not Manager, Handler, Base or Impl"
                )
        for node, name in identifiers(file):
            if bound(node) and name.startswith(("n_", "num_")):
                violations[file.at(node, name)] = "counts are plural nouns: no n_, no num_"
    return violations


def bound(node: ast.AST) -> bool:
    """Whether the file itself chose this name."""
    if isinstance(node, ast.Attribute | ast.keyword | ast.alias):
        return False
    return not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store)


def openings(root: Path) -> dict[str, str]:
    violations = {}
    for file in files(root, EVERYWHERE):
        if not file.text.strip():
            violations[file.path] = "empty: its first line says what it is"
        elif not opens(file):
            violations[file.path] = "the first line is not a docstring"
    return violations


def opens(file: File) -> bool:
    first = file.tree.body[0] if file.tree.body else None
    return ast.get_docstring(file.tree) is not None and first is not None and first.lineno == 1


def private(root: Path) -> dict[str, str]:
    violations = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") and part not in (".github", ".ci") for part in relative.parts[:-1])
        if hidden or path.suffix not in TEXTS or not path.is_file() or relative.parts[0] in ("runs", "work", "build"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if (hit := PRIVATE.search(line)) and relative.as_posix() != "tests/laws/test_10_small.py":
                violations[f"{relative.as_posix()}:{number}"] = f"speaks of {hit.group()}, which is on no other machine"
    return violations


@pytest.mark.parametrize("law", [sizes, names, openings, private], ids=lambda law: str(law.__name__))
def test_small(law: Law) -> None:
    assert unbent(law.__name__, law(ROOT)) == []


LONG = '"""x."""\ndef f():\n' + "    x = 1\n" * 61


@pytest.mark.parametrize(
    ("law", "name", "text"),
    [
        (sizes, "xscale__nn__long", '"""x."""\n' + "x = 1\n" * 400),
        (sizes, "xscale__nn__long", LONG),
        (names, "xscale__nn__utils", '"""x."""'),
        (names, "tests__helpers", '"""x."""'),
        (names, "xscale__nn__good", "class TrainManager: ..."),
        (names, "xscale__nn__good", "class BaseCore: ..."),
        (names, "xscale__nn__good", "def f(n_heads): ..."),
        (names, "xscale__nn__good", "num_layers = 3"),
        (openings, "xscale__nn__good", "import torch"),
        (openings, "xscale__nn__good", "# a comment\n'''Not first.'''"),
        (openings, "xscale__nn__good", ""),
        (private, "xscale__nn__good", "path = '/root" + "/x'"),
        (private, "xscale__nn__good", "path = '/work" + "/main'"),
    ],
)
def test_what_is_not_small_is_seen(tmp_path: Path, law: Law, name: str, text: str) -> None:
    assert law(plant(tmp_path, **{name: text}))


def test_kernels_may_be_longer_and_good_names_pass(tmp_path: Path) -> None:
    plant(tmp_path, kernels__xscale_kernels__op__triton=LONG, xscale__nn__database='"""x."""\nclass Database: ...')
    assert [law(tmp_path) for law in (sizes, names, openings, private)] == [{}, {}, {}, {}]
