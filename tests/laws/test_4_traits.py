"""Law 4: a trait is a test. The suite of a family reads every trait of the family, and names no part."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests.families import FAMILIES, family
from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, files, imports, plant

SUITE = ("tests/conformance", "xscale/conformance")


def test_every_family_is_in_the_table() -> None:
    defined = set()
    for file in files(ROOT, ("xscale",)):
        for node in file.nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Family":
                assert isinstance(node.args[0], ast.Constant), file.at(node, "a family is named by a plain word")
                defined.add(node.args[0].value)
    assert defined == set(FAMILIES)
    assert all(family(name).name == name for name in FAMILIES)


def traits_read(root: Path, name: str) -> set[str]:
    """Traits that the family's suite, test_<family>.py and test_<family>_*.py, reads: `<something>.traits.<trait>`."""
    read = set()
    for file in files(root, SUITE):
        stem = file.parts[-1].removeprefix("test_")
        if stem != name and not stem.startswith(f"{name}_"):
            continue
        for node in file.nodes:
            if isinstance(node, ast.Attribute):
                above = node.value
                if getattr(above, "attr", getattr(above, "id", "")) == "traits":
                    read.add(node.attr)
    return read


@pytest.mark.parametrize("name", FAMILIES)
def test_every_trait_is_read_by_a_check(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(family(name).traits)}
    unread = {f"{name}.{field}": "no conformance check reads it" for field in fields - traits_read(ROOT, name)}
    assert unbent("traits", unread) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_trait_says_what_it_promises(name: str) -> None:
    source = inspect.getsource(sys.modules[family(name).traits.__module__])
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == family(name).traits.__name__)
    said = [isinstance(node, ast.Expr) for node in body[1:]] + [False]
    silent = [
        ast.unparse(node)
        for node, after in zip(body, said, strict=True)
        if isinstance(node, ast.AnnAssign) and not after
    ]
    assert silent == []


def parts_named(root: Path, known: dict[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Where the suite names a part, in a string or by importing it. `known`: part -> its class, with its module."""
    violations = {}
    for file in files(root, SUITE):
        prose = {id(node.value) for node in file.nodes if isinstance(node, ast.Expr)}
        for node in file.nodes:
            if isinstance(node, ast.Constant) and id(node) not in prose and node.value in known.keys() - set(allowed):
                violations[file.at(node, repr(node.value))] = "the suite names no part"
        violations |= {file.at(node, module): "the suite names no part" for node, module in parts_imported(file, known)}
    return violations


def parts_imported(file: File, known: dict[str, str]) -> list[tuple[ast.AST, str]]:
    classes = set(known.values())
    # A module that also has the registry of its family names no part, but its classes do.
    modules = {name.rpartition(".")[0] for name in classes} - {place.partition(":")[0] for place in FAMILIES.values()}
    return [(node, name) for node, name in imports(file) if name in modules | classes]


def words_of_traits() -> set[str]:
    """Names of traits and the values that they may take: these a check must be able to say."""
    said: set[str] = set()
    for name in FAMILIES:
        for field, hint in get_type_hints(family(name).traits).items():
            said |= {field, *flat(hint)}
    return said


def flat(hint: object) -> set[str]:
    names: set[str] = set()
    for argument in get_args(hint):
        names |= {argument} if isinstance(argument, str) else flat(argument)
    return names


def test_the_suite_names_no_part() -> None:
    known = {
        entry.name: f"{entry.part.__module__}.{entry.part.__name__}" for name in FAMILIES for entry in family(name)
    }
    assert unbent("traits", parts_named(ROOT, known, words_of_traits())) == []


@pytest.mark.parametrize(
    "text",
    ["build('elastic')", "from xscale.nn.attention.elastic import Elastic", "import xscale.nn.attention.elastic"],
)
def test_a_part_that_is_named_is_seen(tmp_path: Path, text: str) -> None:
    plant(tmp_path, tests__conformance__test_core=text)
    assert parts_named(tmp_path, {"elastic": "xscale.nn.attention.elastic.Elastic"}, ())


def test_a_trait_that_is_read_elsewhere_only_is_seen(tmp_path: Path) -> None:
    plant(tmp_path, tests__conformance__test_core="entry.traits.causal", tests__conformance__test_norm="x.traits.exact")
    assert traits_read(tmp_path, "core") == {"causal"}
