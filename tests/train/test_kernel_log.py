"""The run's log says which implementations of operators it used and why; a recipe can name them."""

import logging
import re
from pathlib import Path

import pytest
import torch

from tests.train import tiny
from xscale.core.config import decode, encode
from xscale.nn.module import CHOOSABLE_KERNELS
from xscale.recipe import Recipe
from xscale.train.kernel_log import KernelSelectionLog
from xscale.train.run import train
from xscale_kernels.rmsnorm.op import rmsnorm
from xscale_kernels.select import LOG, operators


def chosen(folder: Path) -> list[str]:
    """The lines of the log's first entry on kernels."""
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.endswith(" kernels:") and line[0] != " ")
    found = []
    for line in lines[start + 1 :]:
        if not line.startswith("    "):
            break
        found.append(line.strip())
    return found


def test_the_log_says_what_was_chosen_and_why(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, train={"steps": 2, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0})
    assert train(recipe) == 0
    lines = chosen(tmp_path / "run")
    seen = {line.partition(":")[0].partition(" (")[0] for line in lines}
    assert seen >= {
        "adamw", "bias_dropout_residual", "gated_activation", "grouped_gemm", "linear_cross_entropy", "permute",
        "rmsnorm", "rope", "router", "squared_norm",
    }  # fmt: skip
    assert "squared_norm: torch (first usable)" in lines
    assert any(line.startswith("rmsnorm: torch (first usable; cpu refused: fewer than") for line in lines)


def test_a_recipe_names_implementations(tmp_path: Path) -> None:
    steps = {"steps": 2, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0}
    named = {"rmsnorm": "reference", "rope": "cpu", "adamw": "reference", "grouped_gemm": "reference"}
    recipe = tiny.recipe(tmp_path, train=steps)
    recipe = decode(Recipe, encode(recipe) | {"kernels": named})
    assert recipe.check() == []
    assert train(recipe) == 0
    lines = chosen(tmp_path / "run")
    # What is plain torch anyway is not asked for by name again: only what is chosen call by call is in the log.
    assert "rope: cpu (named)" in lines
    assert "adamw: reference (named)" in lines
    assert "grouped_gemm: reference (named)" in lines
    assert not any(line.startswith("rmsnorm: torch") for line in lines)


def test_what_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    recipe = decode(Recipe, encode(tiny.recipe(tmp_path)) | {"kernels": {"rmsnorm": "tritan", "rmsnrm": "cpu"}})
    problems = [str(problem) for problem in recipe.check()]
    expected = "rmsnorm has no implementation 'tritan'. Take "
    assert any(expected in text for text in problems), problems
    assert any("kernels.rmsnrm: there is no operator 'rmsnrm'" in text for text in problems), problems


def test_flash_attn_is_refused_under_torch_compile(tmp_path: Path) -> None:
    kernels = {"kernels": {"packed_attention": "flash_attn"}}
    named = decode(Recipe, encode(tiny.recipe(tmp_path)) | kernels)
    assert named.check() == []
    compiled = decode(Recipe, encode(tiny.recipe(tmp_path)) | kernels | {"parallel": {"compile": True}})
    assert [str(problem) for problem in compiled.check()] == [
        "kernels.packed_attention: torch.compile cannot keep 'flash_attn' in its graphs. "
        "Take torch, or parallel.compile=false. Or leave it out."
    ]


def test_what_may_be_named_is_what_the_code_asks_for(tmp_path: Path) -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (tiny.ROOT / "xscale").rglob("*.py"))
    assert set(re.findall(r"(?:self|head|router)\.kernel_choices\.get\(\"(\w+)\"\)", code)) == set(CHOOSABLE_KERNELS)
    assert set(CHOOSABLE_KERNELS) < set(operators())
    recipe = decode(Recipe, encode(tiny.recipe(tmp_path)) | {"kernels": {"cross_entropy": "torch"}})
    problems = [str(problem) for problem in recipe.check()]
    assert problems == [
        "kernels.cross_entropy: the implementation of 'cross_entropy' cannot be chosen here. "
        f"These can: {', '.join(CHOOSABLE_KERNELS)}."
    ]


def test_listening_ends() -> None:
    chosen, before = KernelSelectionLog(), LOG.level
    rmsnorm(torch.ones(2, 4), None)
    with chosen.recording():
        rmsnorm(torch.ones(2, 4), None)
        rmsnorm(torch.ones(2, 4), None)
    rmsnorm(torch.ones(2, 4), None)
    assert chosen.drain().count("\n") == 1
    assert chosen.drain() == ""
    assert LOG.level == before
    assert chosen not in LOG.handlers
    assert not LOG.isEnabledFor(logging.INFO) or before


@pytest.mark.parametrize("name", ["cpu", "reference", "torch"])
def test_a_named_one_survives_compilation(name: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: rmsnorm(x * 2, None, implementation=name) + 1, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rmsnorm(x * 2, None, implementation="reference") + 1)
