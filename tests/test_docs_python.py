"""Every block of Python in the documentation runs; those that are whole files are run by the commands of their page."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec, patch

import pytest
import torch

import xscale
from tests.train import tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
"""Not those with a title: they are whole files."""
BLOCKS = {
    str(page.relative_to(ROOT)): blocks for page in PAGES if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}
Names = dict[str, Any]


def _python(folder: Path) -> Names:
    """A recipe that takes seconds stands for quickstart, once the documented call has been accepted."""
    load = xscale.load_recipe

    def load_recipe(config: str, overrides: list[str]) -> Any:
        assert load(config, overrides).train.steps == 50
        return tiny.recipe(folder / "runs", name="quickstart", train={"steps": 1, "eval_every": 0})

    xscale.load_recipe = load_recipe
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "torch": torch, "batches": [(ids, ids)]}


def _evaluate(folder: Path) -> Names:
    import xscale.evaluate.tasks as tasks

    sys.modules["lm_eval"] = SimpleNamespace(simple_evaluate=lambda model, tasks, limit: {})  # type: ignore[assignment]
    tasks.lm_eval_model_of_run = create_autospec(tasks.lm_eval_model_of_run)
    return {}


def _data_flow(folder: Path) -> Names:
    from xscale.nn.signals import BATCH, TOKENS, Signal, TokenAxes
    from xscale.nn.tokens import Tokens
    from xscale.objective.objective import Batch

    ids = torch.zeros(2, 8, dtype=torch.long)
    given = {"ids": ids, "documents": ids, "grades": ids.double(), "targets": ids, "fields": {}}
    flow = {
        "Signal": Signal,
        "TokenAxes": TokenAxes,
        "BATCH": BATCH,
        "TOKENS": TOKENS,
        "Batch": Batch,
        "Tokens": Tokens,
    }
    return {**given, **flow, "Tensor": torch.Tensor, "tokens": Tokens.from_ids(ids)}


def _contributing(folder: Path) -> Names:
    from tests.distributed import distributed
    from xscale.nn.norm.norm import NORMS, Norm, NormTraits

    NORMS._entries.pop("scale")  # There is one of that name.
    return {"NORMS": NORMS, "Norm": Norm, "NormTraits": NormTraits, "distributed": distributed, "Path": Path}


NAMES: dict[str, Callable[[Path], Names]] = {
    "CONTRIBUTING.md": _contributing,
    "docs/architecture/data-flow.md": _data_flow,
    "docs/how-to/evaluate.md": _evaluate,
    "docs/how-to/new-attention.md": lambda folder: {},
    "docs/how-to/python.md": _python,
}
"""Page -> the names that its sentences give to its blocks, which run one after the other."""


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Take back what blocks register, and run them in a folder of their own."""
    import xscale.evaluate.tasks as tasks
    from xscale.nn.norm.norm import NORMS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(xscale, "load_recipe", xscale.load_recipe)
    monkeypatch.setattr(tasks, "lm_eval_model_of_run", tasks.lm_eval_model_of_run)
    with patch.dict(sys.modules), patch.dict(NORMS._entries):
        yield


def test_every_page_has_its_names() -> None:
    assert set(BLOCKS) == set(NAMES)


@pytest.mark.parametrize("page", sorted(BLOCKS))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, undone: None) -> None:
    names = {"__name__": "documentation", **NAMES[page](tmp_path)}
    for number, block in enumerate(BLOCKS[page]):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
