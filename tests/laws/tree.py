"""The project as data: its Python files, parsed, and the package each belongs to. A law test runs on any such tree."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("xscale", "kernels", "launch", "plugins")


@dataclass(frozen=True)
class File:
    """One Python file of the tree."""

    root: Path
    path: str
    """Path from the root, with slashes."""

    @cached_property
    def text(self) -> str:
        return (self.root / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, as `ast.walk` yields them: walked once for all laws."""
        return list(ast.walk(self.tree))

    @property
    def parts(self) -> list[str]:
        return self.path.removesuffix(".py").split("/")

    @property
    def module(self) -> str:
        """Dotted name as it is imported."""
        parts = self.parts[1:] if self.parts[0] in CODE[1:] else self.parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The row of DESIGN's import table."""
        return package_of(self.module)

    def at(self, node: ast.AST, what: str) -> str:
        """`path:line: what`."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def package_of(module: str) -> str:
    """`xscale.nn.blocks.block` -> `nn`; `xscale_kernels.permute` -> `xscale_kernels`; others -> their first name."""
    first, *rest = module.split(".")
    return rest[0] if first == "xscale" and rest else first


def files(root: Path = ROOT, folders: tuple[str, ...] = CODE) -> list[File]:
    """Every Python file below `folders`."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    make = _file_of_project if root == ROOT else File
    return [make(root, path.relative_to(root).as_posix()) for path in paths]


@cache
def _file_of_project(root: Path, path: str) -> File:
    """Parsed once for all laws."""
    return File(root, path)


def plant(root: Path, **texts: str) -> Path:
    """A synthetic tree for a negative control: `xscale__nn__bad=...` writes xscale/nn/bad.py."""
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def imports(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Every module that the file imports anywhere, in functions and under TYPE_CHECKING too, by absolute name.

    `from a import b` gives both `a` and `a.b`: b may be a module.
    """
    for node in file.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = file.module.split(".")
                above = above if file.path.endswith("__init__.py") else above[:-1]
                above = above[: len(above) - node.level + 1]
                module = ".".join([*above, *filter(None, [module])])
            yield node, module
            for alias in node.names:
                yield node, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__", "find_spec"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node, argument.value


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def dotted(node: ast.AST) -> str:
    """`torch.distributed.all_reduce` as written; empty when the node is no chain of names."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def meaning(file: File) -> dict[str, str]:
    """Names that the file imports, and what they stand for: `import torch.nn as n` -> {"n": "torch.nn"}."""
    means: dict[str, str] = {}
    for node in file.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                means[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            means |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return means


def identifiers(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Every name that code (not prose) uses: variables, attributes, parameters, functions, classes, imports."""
    for node in file.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node, name
            case ast.alias(name=name, asname=other):
                yield node, other or name


def words(name: str) -> list[str]:
    """`ProcessGroup`, `process_group` -> ["process", "group"]."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
