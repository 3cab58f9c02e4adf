"""How often the host waits for the device in a step: never in a dense or dropless layer, nor in one with a capacity.

On a CPU nothing waits. What would wait on a GPU is counted: operators whose result, or the shape of it, the host has to
know. What a custom operator does inside is not, since its implementation for a GPU is another.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import Pool
from tests.train.tiny import recipe, run
from xscale.evaluate.evaluate import evaluate
from xscale.mesh.environment import read_rank_info
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.statistics import copy_to_cpu
from xscale.nn.tokens import Stats
from xscale.step.stepper import Stepper
from xscale.train.optimizer_step.optimizer_step import OptimizerStep
from xscale.train.setup import set_up

READS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "histc"),
    *("unique_dim", "unique_consecutive", "_unique2", "unique_dim_consecutive"),
)


class HostWaits(TorchDispatchMode):
    """Counts the operators for which the host would wait, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def record(self, name: str) -> None:
        self.counts[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in READS or any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.record(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.record(name)
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class ListsRead(TorchFunctionMode):
    """Records `tolist`, which a CPU does without an operator, and other methods of a tensor."""

    def __init__(self, record: Callable[[str], object], methods: tuple[str, ...] = ("tolist",)) -> None:
        super().__init__()
        self.record = record
        self.names = {getattr(Tensor, method): method for method in methods}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.names:
            self.record(self.names[func])
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> Counter[str]:
    waits = HostWaits()
    with ListsRead(waits.record), waits:
        work()
    return +waits.counts


def model(depth: int, ffn: dict[str, Any]) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2}
    return {
        "kind": "decoder",
        "width": 32,
        "stack": {"depth": depth, "block": {"mixer": mixer, "ffn": ffn, "dropout": 0.1}},
    }


MOE = {"kind": "moe", "experts": 4, "expert": {"kind": "gated", "hidden": 16}}
FFNS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "gated", "hidden": 48},
    "dropless": {**MOE, "router": {"kind": "topk", "top_k": 2}},
    "capacity": {**MOE, "router": {"kind": "switch"}, "capacity_factor": 0.75},
    "expert dropout": {**MOE, "router": {"kind": "switch"}, "capacity_factor": 0.75, "expert_dropout": 0.2},
}


def waits_of_a_step(
    folder: Path, depth: int, ffn: dict[str, Any], *, fixed: bool = True, **sections: Any
) -> Counter[str]:
    """Waits of a step of one micro-batch, and of the copy of its statistics to the CPU, which a logged step reads."""
    parts = set_up(recipe(folder, "run", model=model(depth, ffn), **sections), read_rank_info())
    stats = Stats()
    (samples,) = parts.training.loader.stream(parts.training.requests(0, 2 * parts.training.ranks, 1))
    batch = parts.training.make(samples, 1, 2, stats)

    def step() -> None:
        Stepper(parts.stepper.engine, parts.objective, parts.mesh.device).step([batch], 1e-3)
        copy_to_cpu(stats.means())

    with pytest.MonkeyPatch.context() as patch:
        # On a GPU dropped assignments keep their rows.
        patch.setattr(Moe, "fixed_shapes", lambda self, flat: fixed)
        step()
        stats._sums.clear()
        return counted(step)


@pytest.mark.parametrize("name", FFNS)
def test_a_layer_waits_for_nothing(tmp_path: Path, name: str) -> None:
    shallow, deep = (waits_of_a_step(tmp_path, depth, FFNS[name]) for depth in (1, 3))
    assert deep == shallow
    assert sum(shallow.values()) <= 4, shallow


def test_without_fixed_shapes_a_layer_with_a_capacity_waits(tmp_path: Path) -> None:
    """Negative control: rows are selected by a mask, whose number of ones the host has to know."""
    shallow, deep = (waits_of_a_step(tmp_path, depth, FFNS["capacity"], fixed=False) for depth in (1, 3))
    assert (deep - shallow)["index"] >= 2


def test_an_evaluation_waits_at_its_end_only(tmp_path: Path) -> None:
    parts = set_up(recipe(tmp_path, "run", model=model(1, FFNS["dense"])), read_rank_info())
    validation = parts.validation
    assert validation is not None

    def waits(sequences: int) -> Counter[str]:
        batches = validation.evaluation(sequences)
        return counted(lambda: evaluate(parts.model, parts.objective, batches, parts.token_bytes))

    assert waits(8) == waits(2)


@pytest.mark.parametrize("name", ["capacity", "expert dropout"])
def test_a_dispatch_over_ranks_waits_once(tmp_path: Path, pool: Pool, name: str) -> None:
    """One wait, for the numbers of rows that the ranks send each other."""
    sections = {"parallel": {"mesh": {"ep": 2}}}
    shallow = pool.run(waits_of_a_step, 2, tmp_path, 1, FFNS[name], **sections)
    deep = pool.run(waits_of_a_step, 2, tmp_path, 3, FFNS[name], **sections)
    for of_one_layer, of_three in zip(shallow, deep, strict=True):
        assert of_three - of_one_layer == Counter({"tolist": 2})


def waits_of_the_loop(folder: Path) -> list[tuple[int, int]]:
    """All-reduces of the world by the trainer, and waits of the host, in each step of a run on this rank."""
    counts, per_step = Counter[str](), list[tuple[int, int]]()
    step, all_reduce = OptimizerStep.take, dist.all_reduce

    def reduce(*given: Any, **named: Any) -> Any:
        counts["all_reduce"] += 1
        return all_reduce(*given, **named)

    def record(name: str) -> None:
        counts["waits"] += 1

    def counted_step(self: OptimizerStep) -> Any:
        counts.clear()
        decision = step(self)
        per_step.append((counts["all_reduce"], counts["waits"]))
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduce)
        patch.setattr(OptimizerStep, "take", counted_step)
        train = {"steps": 4, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0}
        observe = {"progress": False, "tensorboard": False, "report": False, "every_steps": 100}
        with ListsRead(record):
            run(recipe(folder, "run", model=model(1, FFNS["dense"]), train=train, observe=observe))
    return per_step


def test_a_step_of_the_loop_reduces_and_waits_once(tmp_path: Path, pool: Pool) -> None:
    """The first counts its targets in a reduction of its own; those of each later step ride in the one before."""
    for first, *later in pool.run(waits_of_the_loop, 2, tmp_path):
        assert first == (2, 2)
        assert later == [(1, 1)] * 3
