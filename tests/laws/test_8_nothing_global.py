"""Law 8: nothing global. No `global`, no state in a module, and the environment read in two files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, dotted, files, plant

ENVIRONMENT = ("xscale/mesh/environment.py", "launch/xscale_launch/env.py")
CHANGES = "append add extend insert update setdefault pop popitem popleft appendleft clear remove discard sort reverse"
MUTATORS = frozenset(CHANGES.split())
MAKERS = (
    "ContextVar local count cycle Lock RLock Generator Random default_rng deque "
    "defaultdict WeakKeyDictionary WeakValueDictionary WeakSet Console"
)
STATEFUL = frozenset(MAKERS.split())
"""Calls whose result is made to be changed: at module level they are a global by another name."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def violations(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files(root):
        for node, what in [*globals_of(file), *state_of(file), *environment_of(file)]:
            found[file.at(node, what.split(":")[0])] = what
    return found


def globals_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    for node in file.nodes:
        if isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}: pass it as an argument"


def state_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Module-level names that functions change, and module-level objects that exist to be changed."""
    held: set[str] = set()
    imported: set[str] = set()
    for node in file.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if isinstance(node.value, ast.Call) and dotted(node.value.func).split(".")[-1] in STATEFUL:
                yield node, f"{ast.unparse(node.value.func)}(): state in a module"
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            held.add(node.name)
    for one in file.nodes:
        if isinstance(one, ast.Import | ast.ImportFrom):
            imported |= names_of(one)
    for change, name, call in changes(file.tree, frozenset()):
        first = name.split(".")[0]
        if first in held or (first in imported and not call):
            yield change, f"{name}: a function changes what a module holds"
        elif first == "cls" and "." in name:
            yield change, f"{name}: a function changes its class"


def names_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).split(".")[0] for alias in node.names}


def changes(scope: ast.AST, inherited: frozenset[str], inside: bool = False) -> Iterator[tuple[ast.AST, str, bool]]:
    """(node, dotted name, whether by a method) of each thing that a function changes in place and did not make."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, Function):
            yield from changes(node, inherited | locals_of(node), True)
            continue
        todo += ast.iter_child_nodes(node)
        if not inside:
            continue
        for changed, call in targets_of(node):
            name = dotted(changed)
            if name and name.split(".")[0] not in inherited:
                yield node, name, call


def targets_of(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The objects that a statement or call changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        yield node.func.value, True
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(one, ast.Subscript):
                yield one.value, False
            elif isinstance(one, ast.Attribute):
                yield one, False


def locals_of(function: Function) -> set[str]:
    """Names that the function makes itself. What it imports is not its own, and `cls` is its class."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {one.arg for one in every if one is not None} - {"cls"}
    body = function.body if isinstance(function.body, list) else [function.body]
    for part in body:
        names |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names


def environment_of(file: File) -> Iterator[tuple[ast.AST, str]]:
    if file.path in ENVIRONMENT:
        return
    for node in file.nodes:
        if dotted(node) in ("os.environ", "os.getenv", "os.putenv", "os.unsetenv", "os.environb"):
            yield node, f"{dotted(node)}: the environment is read in {' and '.join(ENVIRONMENT)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv", "putenv", "environb"):
                    yield node, f"os.{alias.name}: the environment is read in {' and '.join(ENVIRONMENT)}"


def test_nothing_is_global() -> None:
    assert unbent("nothing global", violations(ROOT)) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 0\ndef f():\n    global x\n    x = 1",
        "SEEN = []\ndef f(y):\n    SEEN.append(y)",
        "SEEN: dict[str, int] = {}\ndef f(y):\n    SEEN[y] = 1",
        "SEEN = set()\nclass A:\n    def f(self, y):\n        SEEN.add(y)",
        "import torch\ndef f():\n    torch.backends.x = 1",
        "def f():\n    import deepspeed\n    deepspeed.ops['a'] = False",
        "class A:\n    kept = {}\n    def f(self):\n        A.kept['x'] = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        cls.made = 1",
        "import threading\nSTATE = threading.local()",
        "from contextvars import ContextVar\nx = ContextVar('x')",
        "import os\ndef f():\n    return os.environ.get('A')",
        "from os import getenv\nx = getenv('A')",
    ],
)
def test_state_is_seen(tmp_path: Path, text: str) -> None:
    assert violations(plant(tmp_path, xscale__train__bad=text))


def test_constants_and_locals_pass(tmp_path: Path) -> None:
    plant(
        tmp_path,
        xscale__train__good="TABLE = {'a': 1}\nLOG = object()\ndef f(x):\n    seen = []\n    seen.append(TABLE[x])\n"
        "    def g(TABLE):\n        TABLE['b'] = 2\n    return seen",
        xscale__mesh__environment="import os\ndef read():\n    return os.environ['RANK']",
    )
    assert violations(tmp_path) == {}
