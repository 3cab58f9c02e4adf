"""The files that CONTRIBUTING names in the order of reading exist, and import each other as it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def rows(name: str) -> list[tuple[str, list[str]]]:
    """File and its neighbours of each row of the table between the marks of that name, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    match = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert match, name
    cells = [re.sub("`", "", line).strip("|").split("|") for line in match[1].splitlines()[2:]]
    return [(file.strip(), neighbours.split()) for file, _, neighbours in cells]


def imported(path: Path) -> set[str]:
    """The modules that a file imports, lazily too, as paths."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {f"{module.replace('.', '/')}.py" for module in modules}


@pytest.mark.parametrize("name", ["a batch", "a residual stream"])
def test_the_files_exist_and_import_so(name: str) -> None:
    table = rows(name)
    files = [file for file, _ in table]
    assert len(files) > 3
    assert len(set(files)) == len(files)
    for file, neighbours in table:
        assert (ROOT / file).is_file(), file
        assert set(neighbours) == imported(ROOT / file) & set(files), f"{file} imports other files of the table"
