"""The map of packages in CONTRIBUTING.md, drawn from docstrings: `python -m tests.laws.package_map --write`."""

import ast
import re
import sys
from pathlib import Path

from tests.laws.tree import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
FIRST, LAST = "<!-- map: first line -->\n", "<!-- map: last line -->\n"
TOP = ("xscale", "launch/xscale_launch", "kernels/xscale_kernels")
WITHOUT_FOLDERS = ("kernels/xscale_kernels", "xscale/bench")
"""Packages whose folders are many and alike."""


def drawn(root: Path = ROOT) -> str:
    """Return a line for each package, indented by its depth, with the first sentence of its docstring."""
    lines = [line for top in TOP for line in _below(root, root / top, 0)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _below(root: Path, folder: Path, depth: int) -> list[str]:
    if not (folder / "__init__.py").is_file():
        return []
    name = folder.relative_to(root).as_posix() if depth == 0 else folder.name
    line = f"{'  ' * depth}{name}/"
    lines = [f"{line:<24}{_sentence(folder / '__init__.py')}"]
    if folder.relative_to(root).as_posix() not in WITHOUT_FOLDERS:
        for child in sorted(folder.iterdir()):
            lines += _below(root, child, depth + 1)
    return lines


def _sentence(file: Path) -> str:
    """Return the first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.\s+(?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".")


def on_page(text: str) -> str:
    """Return what stands between the two marks."""
    return text.split(FIRST)[1].split(LAST)[0]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        page = page.replace(FIRST + on_page(page) + LAST, FIRST + drawn() + LAST)
        PAGE.write_text(page, encoding="utf-8")
    print(drawn())
