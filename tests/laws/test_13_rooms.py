"""Law 13: what belongs together has a folder, folders are small, and no two of them need each other."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.laws import package_map
from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, files, plant

LOOSE_FILES = 16
FAMILIES = frozenset({"attention", "hf", "mixer", "norm", "objective", "ops", "optimizer", "pattern"}) | frozenset(
    {"position", "router", "source", "stream", "depth", "head"}
)
"""Folders with a file for each part of a family, as many as there are parts."""
CODE = ("xscale", "kernels", "launch")
Arrows = dict[str, set[str]]


def full_folders(root: Path = ROOT) -> dict[str, str]:
    """Folders with more loose files than one can survey."""
    counts: dict[str, int] = {}
    for file in files(root, CODE):
        folder, _, name = file.path.rpartition("/")
        if name != "__init__.py" and folder.rpartition("/")[2] not in FAMILIES:
            counts[folder] = counts.get(folder, 0) + 1
    return {folder: f"{count} loose files" for folder, count in counts.items() if count > LOOSE_FILES}


def arrows_between(modules: dict[str, set[str]], package: str) -> Arrows:
    """Which room of `package` imports which: its folders and its loose files are rooms."""
    arrows: Arrows = {}
    for module, imported in modules.items():
        if (room := _room(module, package)) is None:
            continue
        others = {other for one in imported if (other := _room(one, package)) is not None and other != room}
        arrows.setdefault(room, set()).update(others)
    return arrows


def circles(arrows: Arrows) -> list[list[str]]:
    """Sets of nodes that reach each other."""
    reached = {node: _reached(arrows, node) for node in arrows}
    found = {
        tuple(sorted({node} | {other for other in reached[node] if node in reached.get(other, ())}))
        for node in arrows
        if node in reached[node]
    }
    return sorted(map(list, found))


def imports_of(root: Path = ROOT) -> dict[str, set[str]]:
    """Modules of the project that each one imports, at its top or later."""
    listed = files(root, CODE)
    known = {file.module for file in listed}
    return {file.module: _imported(file, known) - {file.module} for file in listed}


def knots(root: Path = ROOT) -> dict[str, str]:
    """Circles between files, and between the rooms of a package."""
    modules = imports_of(root)
    found = {" ".join(circle): "these files import each other" for circle in circles(modules)}
    packages = {
        ".".join(parts[:end]) for module in modules for parts in [module.split(".")] for end in range(1, len(parts))
    }
    for package in sorted(packages):
        for circle in circles(arrows_between(modules, package)):
            found[f"{package}: {' '.join(circle)}"] = "these rooms need each other"
    return found


def _room(module: str, package: str) -> str | None:
    inside = module.removeprefix(f"{package}.")
    return None if inside == module else inside.split(".")[0]


def _reached(arrows: Arrows, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(arrows[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(arrows.get(node, ()))
    return seen


def _imported(file: File, known: set[str]) -> set[str]:
    return {name for node in file.nodes for name in _names(node) if name in known}


def _names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
    return []


def test_folders_can_be_surveyed() -> None:
    assert unbent("rooms", full_folders()) == []


def test_no_two_rooms_need_each_other() -> None:
    assert unbent("knots", knots()) == []


def test_the_map_is_that_of_the_tree() -> None:
    page = package_map.PAGE.read_text(encoding="utf-8")
    assert package_map.on_page(page) == package_map.drawn(), "run: python -m tests.laws.package_map --write"


def test_a_full_folder_is_seen(tmp_path: Path) -> None:
    plant(tmp_path, **{f"xscale__data__part{number}": "" for number in range(LOOSE_FILES + 1)})
    assert list(full_folders(tmp_path)) == ["xscale/data"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("from xscale.b import two", "from xscale.a import one"),
        ("def f():\n    from xscale.b.two import x", "import xscale.a.one"),
        ("from xscale.b import three", "from xscale.a import four"),
    ],
    ids=["files", "a lazy import", "rooms alone"],
)
def test_a_circle_is_seen(tmp_path: Path, one: str, other: str) -> None:
    planted = {"xscale__a__one": one, "xscale__b__two": other, "xscale__b__three": "", "xscale__a__four": ""}
    plant(tmp_path, **planted)
    assert "xscale: a b" in knots(tmp_path)
