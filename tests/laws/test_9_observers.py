"""Law 9: observers see, they do not steer. They get frozen reports of plain values, never the trainer."""

import ast
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, File, files, imports, plant, words

MAY_IMPORT = ("xscale.observe.", "xscale.core.", "xscale.__version__.")
STEERS = {"trainer", "loop", "state", "model", "module", "optimizer", "loader", "optim", "schedule", "tensor"}
"""Words of types through which an observer could change the run."""


def violations(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root, ("xscale/observe",)):
        for node, module in imports(file):
            ours = module.startswith(("xscale.", "xscale_kernels"))
            if ours and not f"{module}.".startswith(MAY_IMPORT):
                found[file.at(node, module)] = "an observer knows reports, not what makes them"
        found |= {file.at(node, what): what for node, what in signatures(file)}
    return found


def signatures(file: File) -> list[tuple[ast.AST, str]]:
    """Parameters that could steer, observers' calls that answer, and reports that can be changed."""
    found: list[tuple[ast.AST, str]] = []
    for node in file.nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            for name in [one for one in ast.walk(node.annotation) if isinstance(one, ast.Name | ast.Attribute)]:
                said = name.id if isinstance(name, ast.Name) else name.attr
                if STEERS & set(words(said)):
                    found.append((node, f"takes a {said}, which it could change"))
        if isinstance(node, ast.ClassDef) and observes(node):
            for method in [one for one in node.body if isinstance(one, ast.FunctionDef)]:
                if method.name in CALLS and ast.unparse(method.returns or ast.Constant("nothing")) != "None":
                    found.append((method, f"{node.name}.{method.name} answers; the loop must not listen"))
        if isinstance(node, ast.ClassDef) and _is_report(node) and not frozen(node):
            found.append((node, f"{node.name} is not frozen"))
    return found


ASKED_AT_THE_END = {"unwritten"}
"""Questions of the run once all is over, for its exit status."""
CALLS = {
    *(
        "start",
        "step",
        "evaluated",
        "tasks_evaluated",
        "sampled",
        "message",
        "kernels_logged",
        "saved",
        "rolled_back",
        "folder_lost",
    ),
    "finish",
}


def observes(node: ast.ClassDef) -> bool:
    return node.name == "Observer" or any(ast.unparse(one).endswith("Observer") for one in node.bases)


def _is_report(node: ast.ClassDef) -> bool:
    """Whether observers are given it; the report for people is written by an observer."""
    return node.name.endswith(("Report", "Facts")) and not observes(node)


def frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(one) for one in node.decorator_list)


def test_observers_do_not_steer() -> None:
    assert unbent("observers", violations(ROOT)) == []


def test_what_the_loop_may_call_is_what_is_checked() -> None:
    tree = ast.parse((ROOT / "xscale/observe/observer.py").read_text(encoding="utf-8"))
    observer = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    assert {node.name for node in observer.body if isinstance(node, ast.FunctionDef)} == CALLS | ASKED_AT_THE_END


@pytest.mark.parametrize(
    "text",
    [
        "def step(self, trainer: 'int', loop: Trainer): ...",
        "class A(Observer):\n    def step(self, report) -> bool: ...",
        "from xscale.train.loop import train",
        "from xscale.nn.module import Module",
        "def f(x: torch.Tensor): ...",
        "@dataclass\nclass StepReport: ...",
    ],
)
def test_one_that_could_steer_is_seen(tmp_path: Path, text: str) -> None:
    assert violations(plant(tmp_path, xscale__observe__bad=text))
