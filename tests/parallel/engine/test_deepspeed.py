"""DeepSpeed as the engine gives the numbers of one process and of the torch engine, on every layout it takes."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import (
    BATCH,
    LENGTH,
    SEED,
    SPECIALS,
    STEPS,
    VOCABULARY,
    batch_of,
    built,
    sequence_sharding,
    within,
)
from tests.parallel.models import DENSE, MIXTURE, PAIR
from tests.train.tiny import losses, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.checkpoint.planner import local_shards
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.evaluate.evaluate import evaluate
from xscale.mesh.flat_shard import FlatShard
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.parallel.engine.deepspeed import check as deepspeed
from xscale.parallel.engine.deepspeed.engine import DeepSpeedEngine
from xscale.parallel.engine.protocol import Engine
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.planning.memory import deepspeed_memory
from xscale.settings.settings import build_on_meta
from xscale.step.batches import shard_over_cp
from xscale.step.stepper import Stepper
from xscale.train.setup import make_engine

pytestmark = pytest.mark.long


MICRO = 2
Seen = tuple[list[float], list[tuple[str, tuple[int, ...], Tensor]]]


def trained(model: dict[str, Any], parallel: dict[str, Any], *, without: bool = False, **sections: Any) -> Seen:
    """Numbers of some steps, and this rank's pieces of every tensor that a checkpoint would hold.

    `without`: the last micro-batch's gradients are left out.
    """
    forget()
    settings, mesh, network, _ = built(model, parallel, **sections)
    engine: Engine = make_engine(settings, network, sharded_parameters(network), mesh)
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    if without:
        backward = engine.backward
        engine.backward = lambda loss: backward(loss * float(not engine.last))  # type: ignore
    stepper = Stepper(engine, objective, mesh.device, repeats=mesh.degrees.tp)
    spread = sequence_sharding(settings, mesh)
    numbers = []
    for step in range(STEPS):
        here = range(mesh.data_rank, BATCH // MICRO, mesh.degrees.dp)
        batches = [shard_over_cp(batch_of(objective, MICRO, step, number, Stats(), True), spread) for number in here]
        gradients = stepper.step(batches, 0.01)
        numbers += [gradients.loss, gradients.grad_norm]
    here = range(mesh.data_rank, 4, mesh.degrees.dp)
    held_out = [
        (shard_over_cp(batch_of(objective, MICRO, STEPS, number, None, True, noisy=False), spread), True)
        for number in here
    ]
    bytes_each = torch.ones(VOCABULARY, dtype=torch.long)
    numbers.append(evaluate(network, objective, held_out, bytes_each).loss)
    shards = local_shards(engine.state_tensors())
    pieces = [
        (name, offset, local.clone())
        for name, shard in shards.items()
        for local, offset in (shard.boxes() if isinstance(shard, FlatShard) else [(shard.local, shard.offset)])
    ]
    return numbers, pieces


def forget() -> None:
    """DeepSpeed keeps groups in its modules, and an engine alive by its gradients' hooks; the last test's are gone."""
    import gc
    import sys

    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    gc.collect()
    for one in gc.get_objects():
        # xscale has a class of the same name, which holds one.
        if issubclass(type(one), engine.DeepSpeedEngine) and "gone" not in vars(one):
            one.destroy()
            one.gone = True
    comm.cdb = None
    groups._release_process_group_references()
    # Modules are numbered through, and the numbers compared between ranks.
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    Init.param_id = 0


def compare(one: Seen, ranks: list[Seen], tolerance: float = 2e-6) -> None:
    """Compares what all ranks saw and held with one process."""
    numbers, whole = one
    for seen, _ in ranks:
        assert seen == pytest.approx(numbers, rel=tolerance), (seen, numbers)
    for name, _, value in whole:
        covered = torch.zeros_like(value)
        for _, pieces in ranks:
            for piece_name, offset, piece in pieces:
                if piece_name == name and piece.numel():
                    within(covered, offset, piece).fill_(1)
                    difference = (piece - within(value, offset, piece)).abs().max().item()
                    assert difference <= tolerance * max(1.0, value.abs().max().item()), (name, difference)
        assert covered.all(), f"nobody holds all of {name}"
    assert {name for name, *_ in whole} == {name for _, pieces in ranks for name, *_ in pieces}


SINGLE: dict[str, Any] = {
    "precision": {"compute": "float32", "master": "float32"},
    # A larger epsilon than usual, so that Adam does not turn rounding into steps: float32 is what DeepSpeed has.
    "optimizer": {"kind": "adamw", "eps": 1e-3},
}
SPREAD: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}, "dropout": 0.1}},
}
SHARED = {**SPREAD, "stack": {**SPREAD["stack"], "share": "all"}}
HANDED_ON = copy.deepcopy(SPREAD)
HANDED_ON["stack"]["block"]["mixer"]["core"] = "prior_scores"
UNBIASED = copy.deepcopy(MIXTURE)
UNBIASED["stack"]["rules"][0]["ffn"]["router"]["bias_update_rate"] = 0.0
SPAN = {"objective": {"kind": "span"}}
CPU = {"optimizer": "cpu"}


def zero(stage: int, **offload: Any) -> dict[str, Any]:
    return {"zero": {"engine": "deepspeed", "stage": stage, "offload": offload}}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes of its own: of a model under stage 3 DeepSpeed never lets go, nor so of its groups' threads."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def ones(pool: Pool) -> dict[str, Seen]:
    """Each model on one process."""
    return {
        "dense": pool.run(trained, 1, DENSE, {}, **SINGLE)[0],
        "mixture": pool.run(trained, 1, MIXTURE, {}, **SINGLE)[0],
        "pair": pool.run(trained, 1, PAIR, {}, **SINGLE, **SPAN)[0],
        "spread": pool.run(trained, 1, SPREAD, {}, **SINGLE)[0],
        "shared": pool.run(trained, 1, SHARED, {}, **SINGLE)[0],
        "handed on": pool.run(trained, 1, HANDED_ON, {}, **SINGLE)[0],
        "unbiased": pool.run(trained, 1, UNBIASED, {}, **SINGLE)[0],
    }


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1": ("dense", 2, zero(1)),
    "2": ("dense", 2, zero(2)),
    "3": ("dense", 2, zero(3)),
    "1-offloaded": ("dense", 2, zero(1, **CPU)),
    "2-offloaded": ("dense", 2, zero(2, **CPU)),
    "3-offloaded": ("dense", 2, zero(3, **CPU)),
    "3-all-offloaded-recompute": ("dense", 2, {**zero(3, **CPU, parameters="cpu"), "recompute": {"every": 1}}),
    "3-selective": ("dense", 2, {**zero(3), "recompute": {"every": 1, "granularity": "selective"}}),
    "1-tp2": ("dense", 2, {**zero(1), "mesh": {"tp": 2}}),
    "1-dp2-tp2": ("dense", 4, {**zero(1), "mesh": {"tp": 2}}),
    "2-dp2-tp2-offloaded": ("dense", 4, {**zero(2, **CPU), "mesh": {"tp": 2}}),
    "3-dp2-sp2": ("dense", 4, {**zero(3), "mesh": {"tp": 2}, "tensor": {"sequence": True}}),
    "1-experts": ("mixture", 2, zero(1)),
    "2-dp2-tp2-experts": ("mixture", 4, {**zero(2), "mesh": {"tp": 2}}),
    "3-dp2-tp2-experts": ("unbiased", 4, {**zero(3), "mesh": {"tp": 2}}),
    "2-pair": ("pair", 2, zero(2)),
    "3-dp2-tp2-pair": ("pair", 4, {**zero(3), "mesh": {"tp": 2}}),
    "3-shared": ("shared", 2, zero(3)),
    "3-handed-on": ("handed on", 2, {**zero(3), "recompute": {"every": 1}}),
    "1-cp2": ("spread", 2, {**zero(1), "mesh": {"cp": 2}}),
    "2-dp2-cp2": ("spread", 4, {**zero(2), "mesh": {"cp": 2}}),
    "2-compiled": ("spread", 2, {**zero(2), "compile": True}),
    "3-dp2-cp2": ("spread", 4, {**zero(3), "mesh": {"cp": 2}}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_the_numbers_of_one_process(layout: str, ones: dict[str, Seen], pool: Pool) -> None:
    name, ranks, parallel = LAYOUTS[layout]
    models = {"dense": DENSE, "mixture": MIXTURE, "pair": PAIR, "spread": SPREAD, "unbiased": UNBIASED}
    model = {**models, "shared": SHARED, "handed on": HANDED_ON}[name]
    sections = {**SINGLE, **(SPAN if name == "pair" else {})}
    # The compiler alone may take minutes on a busy machine.
    compare(ones[name], pool.run(trained, ranks, model, parallel, **sections))


def test_it_gives_the_numbers_of_the_torch_engine(pool: Pool) -> None:
    """bfloat16 in use and float32 at rest, as the other engine has it."""
    mixed = {**SINGLE, "precision": {"compute": "bfloat16", "master": "float32"}}
    (numbers, _), *_ = pool.run(trained, 2, UNBIASED, {"zero": {"stage": 2}}, **mixed)
    for stage in (2, 3):
        (found, _), *_ = pool.run(trained, 2, UNBIASED, zero(stage), **mixed)
        assert found == pytest.approx(numbers, rel=2e-2)


def test_a_gradient_that_is_left_out_is_seen(ones: dict[str, Seen], pool: Pool) -> None:
    ranks = pool.run(trained, 2, DENSE, zero(2), without=True, **SINGLE)
    with pytest.raises(AssertionError):
        compare(ones["dense"], ranks)


def held_between_steps(parallel: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank's parameters and of what is stepped, and those that a plan counts."""
    forget()
    settings, mesh, network, _ = built(DENSE, parallel, **SINGLE)
    engine = make_engine(settings, network, sharded_parameters(network), mesh)
    assert isinstance(engine, DeepSpeedEngine)
    parts = [getattr(one, "ds_tensor", one.data) for one in network.parameters()]
    stepped = [value for number in range(len(engine.partition.flats)) for value in engine._states(number).values()]
    storages = [one.untyped_storage() for one in (*parts, *engine.partition.flats, *stepped)]
    whole = build_on_meta(settings, VOCABULARY)
    counted = deepspeed_memory(whole, settings.parallel.zero, mesh.degrees, states=2, overlap=False)
    places = (counted.device, counted.cpu, counted.nvme)
    wanted = sum(place.get(kind, 0) for place in places for kind in ("parameters", "optimizer"))
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values()), wanted


@pytest.mark.parametrize("parallel", [zero(1), zero(2, **CPU), zero(3), zero(3, **CPU, parameters="cpu")])
def test_a_plan_counts_what_it_holds(parallel: dict[str, Any], pool: Pool) -> None:
    """But for what fills a partition up, and vectors, which stage 3 keeps whole."""
    for held, wanted in pool.run(held_between_steps, 2, parallel):
        assert wanted == pytest.approx(held, rel=0.03)


def run_one(folder: Path, name: str, **sections: Any) -> int:
    """A whole run of the worker's own rank."""
    forget()
    return run(recipe(folder, name, **{**SINGLE, **sections}))


@pytest.mark.disk
def test_everything_on_a_disk(ones: dict[str, Seen], pool: Pool, tmp_path: Path) -> None:
    """Numbers of one process, and a run that goes on from a checkpoint bitwise."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load()  # here, where no rank waits for the compiler
    parallel = zero(3, optimizer="nvme", parameters="nvme", folder=str(tmp_path))
    compare(ones["dense"], pool.run(trained, 2, DENSE, parallel, **SINGLE))
    test_a_run_goes_on_bitwise(parallel, pool, tmp_path)


@pytest.mark.parametrize("parallel", [zero(1, **CPU), zero(3)], ids=["1-offloaded", "3"])
def test_a_run_goes_on_bitwise(parallel: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    assert pool.run(run_one, 2, tmp_path, "whole", parallel=parallel) == [EXIT_DONE] * 2
    stopped = {"stop_after": 3}
    assert pool.run(run_one, 2, tmp_path, "halves", parallel=parallel, train=stopped) == [EXIT_REQUEUE] * 2
    assert pool.run(run_one, 2, tmp_path, "halves", parallel=parallel) == [EXIT_DONE] * 2
    assert losses(tmp_path, "halves") == losses(tmp_path, "whole")
    mine, theirs = (load_tensors(tmp_path / name / "checkpoints" / "step-00000006") for name in ("halves", "whole"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def run_and_die(folder: Path, name: str, **sections: Any) -> int:
    """The same, whose state in memory stays, as after a kill."""
    from xscale.checkpoint.in_memory import InMemoryCheckpoint

    clear = InMemoryCheckpoint.clear
    InMemoryCheckpoint.clear = lambda self: None  # type: ignore[method-assign]
    try:
        return run_one(folder, name, **sections)
    finally:
        InMemoryCheckpoint.clear = clear  # type: ignore[method-assign]


@pytest.mark.parametrize("parallel", [zero(1, **CPU), zero(3)], ids=["1-offloaded", "3"])
def test_a_run_goes_on_from_memory(parallel: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    """Step 2 is kept in memory; the disk's step 3 is lost, so that nothing else can be gone on from."""
    (tmp_path / "memory").mkdir()
    kept = {"every_steps": 0, "memory_every_steps": 1, "memory_folder": str(tmp_path / "memory")}
    whole, some = ({"steps": 4, "eval_every": 0, "stop_after": one} for one in (None, 3))
    assert pool.run(run_one, 2, tmp_path, "whole", parallel=parallel, train=whole) == [EXIT_DONE] * 2
    answers = pool.run(run_and_die, 2, tmp_path, "kept", parallel=parallel, train=some, checkpoint=kept)
    assert answers == [EXIT_REQUEUE] * 2
    shutil.rmtree(tmp_path / "kept" / "checkpoints")
    assert pool.run(run_one, 2, tmp_path, "kept", parallel=parallel, train=whole, checkpoint=kept) == [EXIT_DONE] * 2
    assert "resuming from the in-memory checkpoint of step 2" in (tmp_path / "kept/log.txt").read_text()
    assert losses(tmp_path, "kept") == losses(tmp_path, "whole")
    mine, theirs = (load_tensors(tmp_path / name / "checkpoints" / "step-00000004") for name in ("kept", "whole"))
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    assert not list((tmp_path / "memory").iterdir())


def test_any_engine_goes_on_from_any_other(pool: Pool, tmp_path: Path) -> None:
    """torch's stage 3, DeepSpeed's 1 with tp and 3, and one process again: as one process alone."""
    steps = [
        (2, {"zero": {"stage": 3}}),
        (4, {**zero(1, **CPU), "mesh": {"tp": 2}}),
        (2, zero(3)),
        (4, zero(2)),
        (1, {}),
    ]
    assert pool.run(run_one, 1, tmp_path, "alone") == [EXIT_DONE]
    for ranks, parallel in steps:
        answers = pool.run(run_one, ranks, tmp_path, "moved", parallel=parallel, train={"stop_after": 1})
        assert answers == [EXIT_REQUEUE] * ranks
    assert pool.run(run_one, 2, tmp_path, "moved", parallel=zero(3, **CPU, parameters="cpu")) == [EXIT_DONE] * 2
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "alone"), rel=1e-6)
    mine, theirs = (load_tensors(tmp_path / name / "checkpoints" / "step-00000006") for name in ("moved", "alone"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(mine[name], value, rtol=0, atol=2e-6 * max(1.0, value.abs().max().item())), name


WIDE = {"kind": "decoder", "width": 64, "stack": {"depth": 1}}
REFUSED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "one process": (1, zero(2), {}, "parallel.zero.engine"),
    "nothing shared": (2, zero(0), {}, "parallel.zero.stage"),
    "a pipeline": (2, {**zero(1), "mesh": {"pp": 2}}, {}, "parallel.mesh.pp"),
    "copies": (4, {**zero(2), "mesh": {"dp_replicate": 2}}, {}, "parallel.mesh.dp_replicate"),
    "experts apart": (2, {**zero(2), "mesh": {"ep": 2}}, {}, "parallel.mesh.ep"),
    "parameters of stage 2": (2, zero(2, **CPU, parameters="cpu"), {}, "parallel.zero.offload.parameters"),
    "states of stage 2 on a disk": (2, zero(2, optimizer="nvme", folder="/x"), {}, "parallel.zero.offload.optimizer"),
    "parameters without states": (2, zero(3, parameters="cpu"), {}, "parallel.zero.offload.optimizer"),
    "no folder": (2, zero(3, optimizer="nvme"), {}, "parallel.zero.offload.folder"),
    "a folder for nothing": (2, zero(3, folder="/x"), {}, "parallel.zero.offload.folder"),
    "double": (2, zero(2), {"precision": {"compute": "float64", "master": "float64"}}, "precision.master"),
    "float8": (
        2,
        zero(2),
        {"model": WIDE, "precision": {"compute": "bfloat16", "float8": "tensor"}},
        "precision.float8",
    ),
    "compiled": (2, {**zero(3), "compile": True}, {}, "parallel.compile"),
    "torch that offloads": (2, {"zero": {"offload": CPU}}, {}, "parallel.zero.offload"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_do_is_refused_with_what_would_work(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deepspeed, "missing_async_io", lambda: None)  # whatever this machine has
    world, parallel, sections, path = REFUSED[what]
    found = recipe(tmp_path, parallel=parallel, **{**SINGLE, **sections}).check(world)
    assert [problem.path for problem in found] == [path]
    assert found[0].advice


def test_an_optimizer_of_whole_matrices_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = OPTIMIZERS.get("adamw")
    matrices = replace(entry, traits=replace(entry.traits, elementwise=False))
    monkeypatch.setitem(OPTIMIZERS._entries, "adamw", matrices)
    assert recipe(tmp_path, **SINGLE).check(2) == []
    (problem,) = recipe(tmp_path, parallel=zero(2), **SINGLE).check(2)
    assert problem.path == "optimizer.kind"
    assert "lion" in problem.advice


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(deepspeed, "find_spec", lambda name: None)
        (problem,) = recipe(tmp_path, parallel=zero(2), **SINGLE).check(2)
    assert "pip install 'deepspeed>=0.19,<0.20'" in str(problem)
    monkeypatch.setattr(deepspeed, "missing_async_io", lambda: "no libaio")
    (problem,) = recipe(tmp_path, parallel=zero(3, optimizer="nvme", folder=str(tmp_path)), **SINGLE).check(2)
    assert problem.path == "parallel.zero.offload"
    assert "libaio" in str(problem)


def test_a_bias_without_a_gradient_is_refused_at_stage_3(tmp_path: Path) -> None:
    router = {"kind": "topk", "bias_update_rate": 0.01}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": {"ffn": {"kind": "moe", "router": router}}}}
    assert recipe(tmp_path, model=model, parallel=zero(2), **SINGLE).check(2) == []
    (problem,) = recipe(tmp_path, model=model, parallel=zero(3), **SINGLE).check(2)
    assert problem.path == "parallel.zero.stage"
