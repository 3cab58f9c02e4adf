"""The blocks of Python in pages that quote the code run; those of the how-to pages run as programs in test_docs."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "how-to"),
]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
"""Not those with a title: they are whole files."""
BLOCKS = {
    str(page.relative_to(ROOT)): blocks for page in PAGES if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}
Names = dict[str, Any]


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
}
"""Page -> the names that its sentences give to its blocks, which run one after the other."""


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Take back what blocks register, and run them in a folder of their own."""
    from xscale.nn.norm.norm import NORMS

    monkeypatch.chdir(tmp_path)
    with patch.dict(sys.modules), patch.dict(NORMS._entries):
        yield


def test_every_page_has_its_names() -> None:
    assert set(BLOCKS) == set(NAMES)


@pytest.mark.parametrize("page", sorted(BLOCKS))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, undone: None) -> None:
    names = {"__name__": "documentation", **NAMES[page](tmp_path)}
    for number, block in enumerate(BLOCKS[page]):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
