"""Law 6, continued: weights are the optimizer's; whoever else changes one does so by a `WeightWriter`.

A module's attribute may be a weight that `fully_shard` gathered for an evaluation, and a write to it is lost. This
finds in-place operations on what looks like a parameter, outside of optimizers.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, dotted, files, plant

IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
HARMLESS = {"requires_grad_", "share_memory_", "pin_memory_"}
VIEWS = {
    "detach",
    "view",
    "view_as",
    "flatten",
    "narrow",
    "transpose",
    "t",
    "select",
    "unflatten",
    "reshape",
    "to_local",
}
"""Methods and functions whose result shares memory with what they are given."""
CALLED = {"parameter", "param", "weight", "bias", "local", "data"}
"""Names under which a parameter goes that no class declares."""
LISTS = {"parameters", "named_parameters", "get_parameter", "sharded_parameters"}
"""Functions that return parameters."""
OTHERS = ("xscale/optim/", "xscale/bench/", "xscale/nn/attention/ops/", "kernels/", "launch/")
"""Folders of optimizers, and of functions of tensors that are no model's parameters."""


def declared(root: Path) -> set[str]:
    """Names of all parameters that modules declare, and of attributes that are annotated as parameters."""
    names = set()
    for file in files(root):
        for node in file.nodes:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if "Parameter" in ast.unparse(node.annotation).split(" | "):
                    names.add(node.target.id)
            elif isinstance(node, ast.Call) and re.search(r"declare|register_parameter", dotted(node.func)):
                strings = [value.value for value in node.args[:2] if isinstance(value, ast.Constant)]
                names |= {value for value in strings if isinstance(value, str)}
    return names


def violations(root: Path) -> dict[str, str]:
    names = declared(root) | CALLED
    return {
        file.at(node, what): "changes a weight behind the back of its shards; take a WeightWriter"
        for file in files(root)
        if not file.path.startswith(OTHERS)
        for function in file.nodes
        if isinstance(function, ast.FunctionDef)
        for node, what in writes(function, names, file)
    }


def writes(function: ast.FunctionDef, names: set[str], file: File) -> Iterator[tuple[ast.AST, str]]:
    """Each in-place operation of a function on a parameter."""
    aliases = parameters_of(function, names)
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr=method) | ast.Name(id=method)) if is_in_place(method):
                is_method = isinstance(node.func, ast.Attribute) and "init." not in dotted(node.func)
                changed = [node.func.value] if is_method else node.args[:1]
                if any(is_parameter(tensor, names, aliases) for tensor in changed):
                    yield node, method
            case ast.Assign(targets=[ast.Attribute(attr="data") as target]) if not is_self(target.value):
                yield node, "data"


def is_in_place(method: str) -> bool:
    return bool(IN_PLACE.fullmatch(method)) and method not in HARMLESS


def is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


def parameters_of(function: ast.FunctionDef, names: set[str]) -> set[str]:
    """Local variables that are parameters, or hold some."""
    aliases: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_parameter(value, names, aliases):
                aliases.add(name)
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                if any(isinstance(part, ast.expr) and is_list(part, aliases) for part in ast.walk(values)):
                    aliases |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return aliases


def is_list(value: ast.expr, aliases: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in aliases
    return isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in LISTS


def is_parameter(value: ast.expr, names: set[str], aliases: set[str]) -> bool:
    """Whether an expression is a parameter by its name, or a view of one."""
    match value:
        case ast.Name(id=name):
            return name in aliases or name in CALLED
        case ast.Attribute(value=owner, attr="data"):
            return not is_self(owner)
        case ast.Attribute(attr=name):
            return name in names
        case ast.Subscript(value=owner):
            return is_parameter(owner, names, aliases)
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in VIEWS | {"get_parameter"}:
            return method == "get_parameter" or is_parameter(owner, names, aliases)
        case ast.Call(func=ast.Name(id=called), args=[first, *_]) if called in VIEWS | {"dict"}:
            return is_parameter(first, names, aliases) or is_list(first, aliases)
    return False


def test_weights_are_written_by_a_weight_writer() -> None:
    assert unbent("weight writes", violations(ROOT)) == []


DECLARES = "class A:\n    gain: Parameter\n    def __init__(self):\n        self.declare('load', (3,))\n"


@pytest.mark.parametrize(
    "body",
    [
        "module.omega.weight.copy_(full)",
        "self.load.add_(step)",
        "load = self.router.load\n    load.copy_(x)",
        "self.gain.mul_(2).add_(step)",
        "parameter.data = x",
        "module.bias.data.zero_()",
        "for name, value in model.named_parameters():\n        value.fill_(0)",
        "every = dict(model.named_parameters())\n    every['a'].copy_(x)",
        "for sharded in sharded_parameters(model):\n        sharded.local.copy_(x)",
        "to_local(parameter.detach()).lerp_(x, 0.5)",
        "model.get_parameter('a').set_(x)",
        "nn.init.normal_(module.weight)",
        "foreach_lerp_(weight, x, 0.5)",
    ],
)
def test_a_write_past_the_shards_is_seen(tmp_path: Path, body: str) -> None:
    assert violations(plant(tmp_path, xscale__nn__bad=f"{DECLARES}\ndef change(self):\n    {body}\n"))


def test_other_tensors_may_be_changed(tmp_path: Path) -> None:
    lines = [
        "weights.write(self.load, x)",
        "scores.add_(x)",
        "self.weight.clone().mul_(2)",
        "bias.requires_grad_(False)",
    ]
    body = "\n    ".join(lines)
    plant(tmp_path, xscale__nn__good=f"{DECLARES}\ndef change(self):\n    {body}\n")
    assert violations(tmp_path) == {}
