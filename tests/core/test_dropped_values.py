"""An override of a kind replaces the files' section; what it drops, and the new part could keep, is said."""

from pathlib import Path

import pytest

from xscale.core.compose import compose
from xscale.recipe import decode_recipe, dropped_values

FILE = """
model: {kind: encoder, width: 96, stack: {depth: 2, block: {norm: batch}}}
objective: masked
optimizer: {kind: adamw, lr: 0.002, eps: 1.0e-6}
"""
DECODER = ["model.kind=decoder", "objective.kind=causal"]
LION = "optimizer.kind=lion"


@pytest.mark.parametrize(
    ("overrides", "lost"),
    [
        ([], {}),
        (["model.kind=encoder", "model.width=64"], {}),
        (DECODER, {"model.kind": ["model.width=96", "model.stack.depth=2", "model.stack.block.norm=batch"]}),
        ([*DECODER, "model.width=64"], {"model.kind": ["model.stack.depth=2", "model.stack.block.norm=batch"]}),
        # Lion has no eps.
        ([LION], {"optimizer.kind": ["optimizer.lr=0.002"]}),
        ([LION, "optimizer.lr=0.001"], {}),
        (["optimizer={kind: lion, lr: 0.001}"], {}),
    ],
)
def test_values_that_another_kind_drops_are_listed(
    tmp_path: Path, overrides: list[str], lost: dict[str, list[str]]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE, encoding="utf-8")
    composed = compose(file, overrides)
    problems = dropped_values(decode_recipe(composed), composed)
    assert {problem.path: problem.what.split(": ")[1].split(", ") for problem in problems} == lost
