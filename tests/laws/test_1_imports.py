"""Law 1: imports point down. DESIGN's table, held on every import, lazy ones too."""

import ast
import sys
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, dotted, files, imports, meaning, package_of, plant

LOW = frozenset({"core", "xscale_kernels"})
ALL = LOW | {"mesh", "nn", "data", "optim", "objective", "measure", "parallel", "checkpoint"}
RUN = ALL | {"observe", "convert", "settings", "step", "run"}
"""Packages below those that work with a run: the run itself, in memory and on disk."""
ROOMS = frozenset({"settings", "step", "run", "distill", "generate", "evaluate", "train"})
MAY: dict[str, frozenset[str]] = {
    "xscale": frozenset({"api", "core"}),
    "core": frozenset(),
    "xscale_kernels": frozenset(),
    "xscale_launch": frozenset(),
    "xscale_tinybert": RUN | {"cli", "evaluate"},
    "mesh": frozenset({"core"}),
    "nn": LOW,
    "data": LOW,
    "optim": LOW,
    "objective": LOW | {"nn"},
    "measure": frozenset({"core", "nn", "mesh"}),
    "parallel": LOW | {"mesh", "nn", "optim"},
    "checkpoint": frozenset({"core", "mesh"}),
    "convert": frozenset({"core", "nn", "data", "checkpoint"}),
    "observe": frozenset({"core", "mesh", "nn"}),
    "watchdog": frozenset({"core", "mesh"}),
    "settings": ALL | {"observe"},
    "step": ALL | {"settings"},
    "run": ALL | {"observe", "convert", "settings", "step"},
    "distill": RUN,
    "generate": RUN,
    "evaluate": RUN | {"distill", "generate"},
    "train": RUN | {"distill", "generate", "evaluate", "watchdog"},
    "planning": ALL | ROOMS,
    "requirements": ALL | {"observe", "settings", "distill"},
    "conformance": ALL | {"settings"},
    "recipe": ALL | {"observe", "settings", "requirements", "conformance"},
    "bench": ALL | ROOMS | {"planning", "observe", "convert", "recipe"},
    "commands": ALL | ROOMS | {"planning", "observe", "convert", "bench", "recipe", "conformance"},
    "cli": ALL | ROOMS | {"xscale_launch", "observe", "watchdog", "convert", "planning", "bench", "commands", "recipe"},
    "text_model": ALL | {"settings", "run", "planning", "observe"},
    "api": LOW | {"mesh", "train", "commands", "recipe", "text_model"},
    "__main__": frozenset({"cli"}),
}
NEVER: dict[str, tuple[str, ...]] = {
    "core": ("torch",),
    "xscale_kernels": ("xscale", "torch.distributed"),
    "xscale_launch": ("torch", "xscale"),
    "mesh": ("xscale.nn",),
    "nn": ("torch.distributed", "triton", "os"),
    "data": ("xscale.nn", "xscale.mesh"),
    "optim": ("xscale.nn", "xscale.mesh"),
    "objective": ("xscale.mesh",),
    "parallel": ("xscale.settings", "xscale.step", "xscale.run", "xscale.train", "xscale.data"),
    "checkpoint": ("xscale.nn", "xscale.parallel"),
    "train": ("xscale.cli.main", "xscale.recipe"),
}


def violations(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files(root):
        if file.package not in MAY and len(file.parts) > 2:
            found[file.path] = f"'{file.package}' has no row in the import table"
            continue
        for node, module in imports(file):
            if what := refused(file.package, module):
                found[file.at(node, module)] = what
        means = meaning(file)
        for node in file.nodes:
            first, _, rest = dotted(node).partition(".")
            if isinstance(node, ast.Attribute) and (what := named(file.package, f"{means.get(first)}.{rest}")):
                found[file.at(node, dotted(node))] = what
    return found


def refused(package: str, module: str) -> str:
    """Why `package` may not import `module`; empty when it may."""
    package = row(package)
    if what := named(package, module):
        return what
    other = row(package_of(module))
    first = module.split(".")[0]
    ours = first in ("xscale", "xscale_kernels", "xscale_launch", "xscale_tinybert")
    if ours and module != "xscale" and other not in MAY[package] | {package} and not plain(module):
        return f"{package} may not import {other}"
    if package == "xscale_launch" and not ours and first not in sys.stdlib_module_names:
        return "the launcher is standard library only"
    return ""


def row(package: str) -> str:
    """The table's row of a package of ours."""
    return package if package in MAY else "top"


def plain(module: str) -> bool:
    """`from xscale import __version__`: anyone may ask for that."""
    return module == "xscale.__version__"


def named(package: str, name: str) -> str:
    for word in NEVER.get(package, ()):
        if name == word or name.startswith(f"{word}."):
            return f"{package} may never name {word}"
    return ""


def test_imports_point_down() -> None:
    assert unbent("imports", violations(ROOT)) == []


def test_no_package_imports_itself_in_a_circle_through_others() -> None:
    for package, allowed in MAY.items():
        for below in allowed:
            assert package not in MAY[below], f"{package} and {below} may import each other"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xscale__nn__bad", "from xscale.mesh import axes"),
        ("xscale__nn__bad", "import os.path"),
        ("xscale__nn__bad", "import torch\ndef f():\n    torch.distributed.barrier()"),
        ("xscale__nn__bad", "def f():\n    import triton.language as tl"),
        ("xscale__nn__bad", "import torch as t\ndef f():\n    t.distributed.barrier()"),
        ("xscale__nn__bad", "from torch import distributed"),
        ("xscale__nn__bad", "from ..mesh import axes"),
        ("xscale__core__bad", "from torch import Tensor"),
        ("xscale__core__bad", "import importlib\nimportlib.import_module('torch.nn')"),
        ("xscale__data__bad", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from xscale.nn import dims"),
        ("xscale__parallel__bad", "from xscale.train.loop import train"),
        ("xscale__checkpoint__bad", "from xscale import parallel"),
        ("xscale____init__", "from xscale.core import errors"),
        ("xscale__helpful__new", "x = 1"),
        ("xscale__train__bad", "from xscale.recipe import Recipe"),
        ("xscale__data__bad", "from xscale import listing"),
        ("kernels__xscale_kernels__bad", "import xscale"),
        ("launch__xscale_launch__bad", "import numpy"),
        ("launch__xscale_launch__bad", "from xscale.core import errors"),
    ],
)
def test_a_bad_import_is_seen(tmp_path: Path, name: str, text: str) -> None:
    assert violations(plant(tmp_path, **{name: text}))


def test_good_imports_pass(tmp_path: Path) -> None:
    plant(
        tmp_path,
        xscale__nn__good="from torch import nn\nfrom xscale.core.config import Config\nfrom . import init",
        xscale__nn__init="",
        xscale__cli="from xscale.train.loop import train\nfrom xscale import recipe, __version__",
        xscale__train__good="from xscale.parallel import plan\nimport os",
        launch__xscale_launch__good="import subprocess, json\nfrom xscale_launch.status import LaunchError",
    )
    assert violations(tmp_path) == {}
