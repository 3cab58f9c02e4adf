"""Law 3: substitution happens at seams that the class declares, by `xscale.nn.module.substitute`, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import xscale.recipe  # noqa: F401  (every part is imported)
from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, files, plant
from xscale.nn.linear import Linear
from xscale.nn.module import Module, seams_of, substitute
from xscale.nn.roles import Role, Seams

ROOMS_OF_RUNS = frozenset({"step", "run", "distill", "generate", "evaluate", "train"})
ENGINES = ROOMS_OF_RUNS | {"parallel", "planning", "bench", "measure", "checkpoint"}
"""Packages that are given a model of another package."""


def declared_seams(root: Path) -> set[str]:
    """Every name that a class of the tree lists in `seams`."""
    names = set()
    for file in files(root):
        for owner in classes(file):
            for line in owner.body:
                if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None and sets_seams(line):
                    assert isinstance(line.value, ast.Dict), f"{owner.name}: `seams` gives each seam its role"
                    names |= {ast.literal_eval(key) for key in line.value.keys if key is not None}
    return names


def sets_seams(line: ast.Assign | ast.AnnAssign) -> bool:
    targets = line.targets if isinstance(line, ast.Assign) else [line.target]
    return [getattr(target, "id", "") for target in targets] == ["seams"]


def methods_of_modules(root: Path) -> set[str]:
    """Every method of a class of `xscale.nn`."""
    return {
        line.name
        for file in files(root)
        if file.package == "nn"
        for owner in classes(file)
        for line in owner.body
        if isinstance(line, ast.FunctionDef)
    }


def classes(file: File) -> Iterator[ast.ClassDef]:
    return (node for node in file.nodes if isinstance(node, ast.ClassDef))


def violations(root: Path) -> dict[str, str]:
    fixed = {"forward"} | declared_seams(root) | methods_of_modules(root)
    found = {}
    for file in files(root):
        if file.package in ENGINES:
            for node, name in replaced(file):
                if name in fixed or name == "setattr":
                    found[file.at(node, name)] = "a module is changed at a seam that it declares, by `substitute` only"
    return found


def replaced(file: File) -> Iterator[tuple[ast.AST, str]]:
    """Attributes that are set on an object other than `self`; `setattr` with a name that is not a literal."""
    for node in file.nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [item for target in node.targets for item in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            module, name = node.args[:2]
            if not is_self(module):
                yield node, name.value if isinstance(name, ast.Constant) else "setattr"
        for target in targets:
            if isinstance(target, ast.Attribute) and not is_self(target.value):
                yield node, target.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_modules_are_changed_at_their_seams_only() -> None:
    assert unbent("seams", violations(ROOT)) == []


PLACES = frozenset(
    {
        Role.BETWEEN_REGIONS, Role.IN_REGION, Role.KV_PROJECTION, Role.STACK_INPUT, Role.STACK, Role.ON_LAST_STAGE,
    }
)  # fmt: skip
"""Roles that say where a submodule stands, whatever its name: parameters in checkpoints bear the name."""


def declared_roles() -> dict[Role, dict[str, list[str]]]:
    """Role -> the names of the seams that have it, with the classes that declare them."""
    names: dict[Role, dict[str, list[str]]] = {}
    for owner in [Module, *subclasses(Module)]:
        if owner.__module__.startswith("xscale."):
            for seam, role in vars(owner).get("seams", {}).items():
                if role is not None:
                    names.setdefault(role, {}).setdefault(seam, []).append(owner.__qualname__)
    return names


def test_every_seam_is_used() -> None:
    """A seam that no engine substitutes at, by its name or by its role in a table, is only a method."""
    used, in_tables = set(), set()
    for node in [node for file in files(ROOT) if file.package in ENGINES for node in file.nodes]:
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            used.add(node.args[1].value)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Role":
            in_tables.add(node.attr)
    roles = declared_roles()
    unused = {seam for role, seams in roles.items() for seam in seams if role.name not in in_tables} - used
    # A pipeline stage names the embeddings by a variable.
    assert unused <= {"embed", "source"}
    assert set(Role) == set(roles), "the vocabulary is what is spoken"


def test_a_role_has_one_name() -> None:
    """One thing has one name, but for submodules, which bear the names of their parameters."""
    twice = {role.name: seams for role, seams in declared_roles().items() if role not in PLACES and len(seams) > 1}
    assert twice == {}


NN = "class Head:\n    seams: ClassVar[Seams] = {'loss': None, 'hook': None}\n    def scale(self): ..."


@pytest.mark.parametrize(
    "text",
    [
        "def apply(module):\n    module.forward = print",
        "def apply(head):\n    head.loss = print",
        "def apply(head):\n    head.scale = print",
        "def apply(head):\n    head.hook: object = print",
        "def apply(a, b):\n    a.loss, b.other = print, print",
        "def apply(model):\n    model.head.loss = None",
        "def apply(module):\n    setattr(module, 'forward', print)",
        "def apply(module, name):\n    setattr(module, name, print)",
    ],
)
@pytest.mark.parametrize("package", ["parallel", "planning", "bench", "train"])
def test_another_way_to_replace_is_seen(tmp_path: Path, text: str, package: str) -> None:
    assert violations(plant(tmp_path, xscale__nn__head=NN, **{f"xscale__{package}__bad": text}))


def test_substitutes_and_own_attributes_pass(tmp_path: Path) -> None:
    text = """
class Sharded:
    def __init__(self, loss):
        self.loss = loss
        setattr(self, "hook", None)
def apply(head, block):
    substitute(head, "loss", Sharded(head.loss))
    block.first_head = 3
"""
    plant(tmp_path, xscale__nn__head=NN, xscale__parallel__good=text)
    assert violations(tmp_path) == {}


class Doubled(Module):
    seams: ClassVar[Seams] = {"inner": Role.REGION, "scale": Role.SUM_OVER_HEADS, "gone": Role.SCAN}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.inner(x))


class Derived(Doubled):
    seams: ClassVar[Seams] = {"random": Role.DRAWS_BETWEEN_REGIONS, "gone": None}


def test_a_method_a_submodule_and_an_attribute_are_substituted() -> None:
    module, x = Doubled(), torch.ones(1, 2)
    names = [name for name, _ in module.named_parameters()]
    inner = module.scale
    substitute(module, "scale", lambda x: inner(x) + 1)
    plain = module.inner(x)
    assert torch.equal(module(x), 2 * plain + 1)
    substitute(module, "inner", nn.Linear(2, 2))
    assert [name for name, _ in module.named_parameters()] == names
    assert not torch.equal(module.inner(x), plain)
    substitute(module, "param_hook", torch.zeros_like)
    assert torch.equal(module.use(module.inner.weight), torch.zeros(2, 2))


def test_an_undeclared_seam_is_refused() -> None:
    with pytest.raises(
        AssertionError, match="Doubled declares no seam 'forward'; its seams: gone, inner, param_hook, random"
    ):
        substitute(Doubled(), "forward", print)
    with pytest.raises(AssertionError, match="Linear declares no seam 'weight'"):
        substitute(nn.Linear(2, 2), "weight", None)
    with pytest.raises(AssertionError, match="Doubled has nothing at its seam 'gone'"):
        substitute(Doubled(), "gone", print)


def test_seams_without_roles_are_refused() -> None:
    """A plugin of the time before roles listed the names alone."""

    class Old(Module):
        seams = ("scale",)  # type: ignore[assignment]

    with pytest.raises(AssertionError, match=r"Old gives its seams no roles \(xscale.nn.roles\): \('scale',\)"):
        seams_of(Old())


def test_seams_are_inherited() -> None:
    assert seams_of(Derived()) == {
        "inner": Role.REGION,
        "scale": Role.SUM_OVER_HEADS,
        "param_hook": Role.PARAMETERS,
        "random": Role.DRAWS_BETWEEN_REGIONS,
    }
    assert "matmul" in seams_of(Linear(2, 2, ("width", "width"), None))  # type: ignore[arg-type]


def test_every_declared_seam_is_there() -> None:
    """On the class, as a method, annotated for a subclass to set, set by the constructor, or of a base class."""
    for owner in subclasses(Module):
        if owner.__module__.startswith("xscale."):
            for seam, role in vars(owner).get("seams", {}).items():
                source = ast.parse((ROOT / f"{owner.__module__.replace('.', '/')}.py").read_text(encoding="utf-8"))
                set_here = {
                    node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and is_self(node.value)
                }
                there = hasattr(owner, seam) or seam in set_here | owner.__annotations__.keys()
                there = there or any(seam in vars(base).get("seams", {}) for base in owner.__mro__[1:])
                assert role is None or there, f"{owner.__qualname__} has no {seam}"


def subclasses(owner: type) -> Iterator[type]:
    for child in owner.__subclasses__():
        yield child
        yield from subclasses(child)


BASE_CLASSES = frozenset(
    {
        "AttentionMask", "Axis", "Block", "Core", "DispatchPlan", "Embedding", "Head", "Linear", "Mixer", "Model",
        "Module", "Norm", "Pairs", "Position", "RandomNumbers", "Recurrence", "Role", "Stack", "Tokens", "WeightWriter",
    }
)  # fmt: skip
"""Names of `xscale.nn` that the engine may know: base classes, and the data that passes through seams."""


def classes_named(root: Path) -> set[str]:
    """Classes and types of `xscale.nn` that the engine imports."""
    return {
        alias.name
        for file in files(root)
        if file.package == "parallel"
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xscale.nn")
        for alias in node.names
        if alias.name[0].isupper() and not alias.name.isupper()
    }


def test_the_engine_names_base_classes_alone() -> None:
    """Whatever else it has to know of a part is the role of a seam, or what the part declares or says by a method."""
    assert classes_named(ROOT) == BASE_CLASSES


def test_a_part_that_the_engine_names_is_found(tmp_path: Path) -> None:
    text = "from xscale.nn.ffn.moe.moe import Moe\nfrom xscale.nn.norm.norm import NORMS, Norm\n"
    plant(tmp_path, xscale__parallel__tensor=text)
    assert classes_named(tmp_path) == {"Moe", "Norm"}
