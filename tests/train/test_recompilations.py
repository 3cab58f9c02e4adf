"""A compiled run compiles in its first step and in its first evaluation, and never again.

The graphs are those that torch.compile traces; they run by PyTorch's own operators.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.tiny import MIXTURE, recipe, run
from xscale.nn.blocks.block import Block
from xscale.nn.tokens import Tokens
from xscale.parallel.compiled_blocks import TrainedInputs
from xscale.train.optimizer_step.optimizer_step import OptimizerStep
from xscale.train.run_work import RunWork

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2}
BLOCK = {"mixer": ATTENTION, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}
DENSE = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}}
# The evaluation's last batch has one sequence of two, and each prompt a length of its own.
TRAIN = {"steps": 4, "eval_every": 2, "eval_sequences": 5, "sample": {"prompts": ["def f", "import"], "tokens": 5}}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE},
    # The number of tokens over an expert's capacity is another in each micro-batch, and so is that of the documents.
    "mixture": {"model": MIXTURE},
    "recomputed": {"model": DENSE, "parallel": {"recompute": {"every": 1}}},
}


class Graphs:
    """The number of graphs after each step, evaluation and generation of a run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import torch._dynamo
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        self.counters = counters
        self.seen: list[tuple[str, int]] = []

        def trace(block: nn.Module, *, dynamic: bool, options: dict[str, bool]) -> None:
            nn.Module.compile(block, dynamic=dynamic, backend="eager")

        patch.setattr(Block, "compile", trace)

    @property
    def count(self) -> int:
        return int(self.counters["stats"]["unique_graphs"])

    def after(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            result = function(*args)
            self.seen.append((label, self.count))
            return result

        return counted


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == "dense" else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_a_run(name: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for owner, method, label in (
        (OptimizerStep, "take", "step"),
        (RunWork, "evaluate", "evaluation"),
        (RunWork, "_write_samples", "samples"),
    ):
        monkeypatch.setattr(owner, method, graphs.after(label, getattr(owner, method)))
    sections = RUNS[name]
    parallel = {"compile": True, **sections.get("parallel", {})}
    assert run(recipe(tmp_path, model=sections["model"], parallel=parallel, train=TRAIN)) == 0
    labels, counts = zip(*graphs.seen, strict=True)
    assert labels == ("step", "step", "evaluation", "step", "step", "evaluation", "samples")
    trained, evaluated = counts[0], counts[2]
    assert 0 < trained < evaluated
    assert counts == (*[trained] * 2, *[evaluated] * 5)


SHAPE = (2, 8)
OTHERS = {
    "of an evaluation's last batch": Tokens.from_ids(torch.zeros(1, 8, dtype=torch.long)),
    "of another length": Tokens.from_ids(torch.zeros(2, 7, dtype=torch.long)),
    "without documents": Tokens.from_ids(torch.zeros(SHAPE, dtype=torch.long)),
    "of a generation": Tokens.from_ids(torch.zeros(SHAPE, dtype=torch.long), torch.zeros(SHAPE), cache={}),
}


@pytest.mark.parametrize("inputs", OTHERS)
def test_inputs_that_training_has_not_had_run_without_a_graph(inputs: str) -> None:
    trained, block = TrainedInputs(), nn.Identity()

    def runs_compiled(tokens: Tokens) -> bool:
        return trained.runs_compiled(block, torch.zeros(*tokens.ids.shape, 4), tokens, None)

    of_training = Tokens.from_ids(torch.zeros(SHAPE, dtype=torch.long), torch.zeros(SHAPE))
    block.eval()
    assert not runs_compiled(of_training)
    block.train()
    assert runs_compiled(of_training)
    block.eval()
    assert runs_compiled(of_training)
    assert not runs_compiled(OTHERS[inputs])
