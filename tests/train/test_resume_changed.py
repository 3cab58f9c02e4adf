"""Stopped and gone on: bitwise on the same layout, to 1e-9 on another, with dropout, router noise and shuffled data.

One run of each layout keeps the checkpoint of its middle. What goes on from it on the same layout must be that run to
the last bit, losses and weights; what goes on from it on another must be the run of one process that never stopped.
"""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.cases import Case
from tests.parallel.models import MODELS, OBJECTIVES, changed
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE

DOUBLE = {"compute": "float64", "master": "float64"}
MIDDLE, STEPS = 2, 3
TRAIN = {
    "steps": STEPS,
    "batch_size": 8,
    "micro_batch_size": 2,
    "eval_every": 0,
    "baseline": False,
    "clip_grad_norm": 0.5,
}
LAYOUTS = {
    "dense": (
        *("", "zero0", "zero1", "zero2", "zero3", "copies zero3", "tp", "sequence", "1f1b", "gpipe"),
        *("interleaved_1f1b", "zero_bubble", "ring", "ulysses", "1f1b tp", "1f1b tp zero3"),
    ),
    "mixture": (
        "",
        "ep zero1",
        "ep zero3",
        "ep4 zero2",
        "sequence ep",
        "whole_experts tp",
        "1f1b ep zero1",
        "ring ep",
        "zbv",
        "dualpipe_v",
    ),
    "pair": ("", "zero3", "sequence", "1f1b", "tp zero1"),
    "clustered": ("", "zero2"),
}
"""Options of each model, those of tests/parallel/cases.py that are joined; `ep4` is twice the ep of `ep`."""
NAMED = {
    "dense": [
        *(("zero1", "zero3"), ("zero3", "zero1"), ("1f1b tp", ""), ("", "1f1b tp zero3"), ("1f1b tp zero3", "")),
        *(
            ("zero0", "tp"),
            ("sequence", "1f1b"),
            ("zero_bubble", "ring"),
            ("ulysses", "zero0"),
            ("copies zero3", "zero2"),
        ),
        *(("gpipe", "interleaved_1f1b"), ("zero2", "ulysses"), ("ring", "gpipe"), ("tp", "sequence")),
    ],
    "mixture": [
        *(("ep4 zero2", "ep zero1"), ("ep zero1", "ep zero3"), ("ep zero3", "1f1b ep zero1"), ("1f1b ep zero1", "")),
        *(
            ("sequence ep", "ep4 zero2"),
            ("", "whole_experts tp"),
            ("whole_experts tp", "ring ep"),
            ("ring ep", "zbv"),
            ("zbv", "dualpipe_v"),
        ),
    ],
    "pair": [("zero3", "1f1b"), ("1f1b", "sequence"), ("sequence", "zero3"), ("tp zero1", ""), ("", "tp zero1")],
    "clustered": [("zero2", ""), ("", "zero2")],
}
"""Changes of layout: over all axes, every layout left and entered."""


def network(model: str) -> dict[str, Any]:
    if model != "clustered":
        return MODELS[model]
    core = {"kind": "routing_transformer"}
    return changed(MODELS["dense"], stack__block__mixer={"kind": "attention", "heads": 4, "core": core})


def parallel(model: str, options: str) -> dict[str, Any]:
    found = Case(model, tuple(options.replace("ep4", "ep").split())).parallel
    if "ep4" in options:
        found["mesh"] = {**found["mesh"], "ep": 4, "dp_shard": 4}
    return found


def ranks(model: str, options: str) -> int:
    mesh, total = parallel(model, options)["mesh"], 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        total *= mesh.get(axis, 1)
    return total


def one_rank(folder: Path, name: str, model: str, options: str) -> int:
    made = network(model)
    sections = {"parallel": parallel(model, options), "train": TRAIN, "precision": DOUBLE, "model": made}
    kept = {"every_steps": MIDDLE, "keep_last": None}
    data = {"validation": 0.0, "cross_documents": model == "clustered"}
    objective = {"kind": OBJECTIVES[made["kind"]]}
    return run(recipe(folder, name, checkpoint=kept, objective=objective, data=data, **sections))


class Runs:
    """Runs, each done once and when it is first asked for."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder, self.pool = folder, pool
        self.whole = cache(self._whole)

    def _whole(self, model: str, options: str) -> str:
        """A run that does not stop; its name."""
        name = f"{model}-{options.replace(' ', '-') or 'alone'}"
        self._run(name, model, options)
        return name

    def gone_on(self, model: str, before: str, after: str) -> str:
        """Goes on from the middle of the run on `before`, on `after`; its name."""
        source = self.folder / self.whole(model, before)
        name = f"{source.name}-to-{after.replace(' ', '-') or 'alone'}"
        middle = f"step-{MIDDLE:08d}"
        shutil.copytree(source / "checkpoints" / middle, self.folder / name / "checkpoints" / middle)
        shutil.copy(source / "config.yaml", self.folder / name)
        shutil.copy(source / "metrics.jsonl", self.folder / name)
        self._run(name, model, after)
        assert f"resuming from step {MIDDLE}" in (self.folder / name / "log.txt").read_text()
        return name

    def _run(self, name: str, model: str, options: str) -> None:
        count = ranks(model, options)
        assert self.pool.run(one_rank, count, self.folder, name, model, options) == [EXIT_DONE] * count

    def ends(self, *names: str) -> list[dict[str, torch.Tensor]]:
        last = f"step-{STEPS:08d}"
        return [load_tensors(self.folder / name / "checkpoints" / last, verify=False) for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), pool)


def every(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(model, one, id=f"{model}-{one}") for model, given in table.items() for one in given]


@pytest.mark.long
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("model", "options"), every(LAYOUTS))
def test_bitwise_on_the_same_layout(runs: Runs, model: str, options: str) -> None:
    whole, again = runs.whole(model, options), runs.gone_on(model, options, options)
    assert losses(runs.folder, again) == losses(runs.folder, whole)
    mine, other = runs.ends(again, whole)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("model", "pair"), every(NAMED))
def test_on_another_layout(runs: Runs, model: str, pair: tuple[str, str]) -> None:
    alone, moved = runs.whole(model, ""), runs.gone_on(model, *pair)
    ours, theirs = (torch.tensor(losses(runs.folder, name), dtype=torch.float64) for name in (moved, alone))
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=0)
    mine, other = runs.ends(moved, alone)
    assert mine.keys() == other.keys()
    far = {name: (mine[name] - one).abs().max().item() for name, one in other.items() if one.numel()}
    assert max(far.values()) < 1e-9, {name: value for name, value in far.items() if value >= 1e-9}


def test_every_layout_is_left_and_entered() -> None:
    for model, layouts in LAYOUTS.items():
        assert {one for one, _ in NAMED[model]} | {one for _, one in NAMED[model]} == set(layouts), model


def test_the_numbers_would_tell(runs: Runs) -> None:
    """The control: weights that were not trained on, or one state that is lost, are far more than 1e-9 away."""
    alone = runs.whole("mixture", "")
    (end,) = runs.ends(alone)
    middle = load_tensors(runs.folder / alone / "checkpoints" / f"step-{MIDDLE:08d}")
    moved = {name for name in end if (end[name] - middle[name]).abs().max() > 1e-6}
    kinds = ("model.", "optimizer.mean.", "optimizer.square.")
    assert all(any(name.startswith(kind) for name in moved) for kind in kinds)
    assert any(name.endswith("router.bias") for name in moved), "a state that no gradient moves"


def test_the_run_has_what_could_differ() -> None:
    made = MODELS["mixture"]
    assert made["stack"]["block"]["dropout"] > 0
    assert made["stack"]["rules"][0]["ffn"]["router"]["jitter"] > 0
    assert recipe(Path("nowhere"), "run").data.order == "shuffled"
