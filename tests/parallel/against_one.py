"""A few steps of training on random tokens, on any layout, to be compared with the same steps on one process."""

import datetime
import functools
import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import Pool
from tests.parallel.models import OBJECTIVES as LEARNS
from tests.train.tiny import recipe
from xscale.evaluate.evaluate import evaluate
from xscale.mesh import axes
from xscale.mesh.collectives import MeanOverOwners, mean_tensors
from xscale.mesh.environment import RankInfo, read_rank_info
from xscale.mesh.mesh import Mesh, build_mesh
from xscale.nn.init import seed_of
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES, Batch, Objective, SpecialTokens
from xscale.optim.optimizer.optimizer import Optimizer
from xscale.parallel import context
from xscale.parallel.engine.fsdp import FsdpEngine
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.parallel.shard.sharded import ShardedParameter, local_shape_and_offset, sharded_parameters
from xscale.recipe import Recipe
from xscale.settings.settings import Settings, build_on_meta
from xscale.step.batches import shard_over_cp
from xscale.step.stepper import Stepper
from xscale.train.setup import make_engine

TOLERANCE = 1e-9
DOUBLE = {"compute": "float64", "master": "float64"}
VOCABULARY, LENGTH, BATCH, STEPS, SEED = 67, 23, 8, 2, 5
TARGET_LENGTH = 13
"""Tokens of a target of pairs, whose sources have LENGTH."""
SPECIALS = SpecialTokens(
    VOCABULARY, pad=0, eos=1, mask=2, sentinels=range(3, 18), bos=18, sentence_ends=frozenset({20})
)
Piece = tuple[tuple[int, ...], Tensor]
"""Where in the whole it begins, and what it is."""


@dataclass
class Found:
    """Losses, norms and parameters of a rank."""

    numbers: list[float] = field(default_factory=list)
    """Each step's loss, gradient norm and targets, then the loss of an evaluation."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Routing statistics of the last step."""
    started: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, Piece] = field(default_factory=dict)
    """Gradients of the first step, not yet clipped."""
    ended: dict[str, Piece] = field(default_factory=dict)


def asked(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe in double precision; it learns by what its kind of model learns by."""
    given: dict[str, Any] = {"precision": DOUBLE, "objective": {"kind": LEARNS[model["kind"]]}, **sections}
    given["train"] = {"clip_grad_norm": 0.5, "batch_size": BATCH, **given.get("train", {})}
    given["data"] = {"sequence_length": LENGTH, **given.get("data", {})}
    return recipe(Path("nowhere"), model=model, parallel=parallel, **given)


def built(
    model: dict[str, Any], parallel: dict[str, Any], **sections: Any
) -> tuple[Settings, Mesh, nn.Module, ParallelPlan]:
    """This rank's part of the model of a checked recipe."""
    settings = asked(model, parallel, **sections)
    here = read_rank_info()
    # The first rank checks for all: each would find the same.
    problems = settings.check(here.world) if here.rank == 0 else []
    assert not problems, problems
    mesh = _mesh(settings.parallel.mesh, here)
    network = build_on_meta(settings, VOCABULARY)
    plan = ParallelPlan(settings.parallel, settings.precision, settings.data.sequence_length)
    return settings, mesh, plan.apply(network, mesh, SEED), plan


def sequence_sharding(settings: Settings, mesh: Mesh) -> context.SequenceSharding | None:
    """How all ranks shard sequences over cp."""
    return context.sequence_sharding_of(build_on_meta(settings, VOCABULARY), mesh, settings.parallel)


def trained(model: dict[str, Any], parallel: dict[str, Any], *, steps: int = STEPS, **sections: Any) -> Found:
    """Train on this rank of as many as there are."""
    settings, mesh, network, _ = built(model, parallel, **sections)
    spread = sequence_sharding(settings, mesh)
    every = sharded_parameters(network)
    rests = [rest for rest in every if rest.parameter.requires_grad]
    found = Found(started=_pieces(every))
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, settings.data.source_length, SEED)
    engine = make_engine(settings, network, every, mesh)
    assert isinstance(engine, FsdpEngine)
    optimizer = _Watched(engine.optimizer)
    engine.optimizer = cast(Optimizer, optimizer)
    degrees = mesh.degrees
    stepper = Stepper(engine, objective, mesh.device, repeats=degrees.tp * degrees.pp)
    apart, micro = not settings.data.cross_documents, settings.train.micro_batch_size
    over_stages = MeanOverOwners(mesh.background)
    for step in range(steps):
        tally = Stats()
        batches = [
            shard_over_cp(batch_of(objective, micro, step, number, tally, apart), spread)
            for number in range(mesh.data_rank, settings.train.batch_size // micro, mesh.degrees.dp)
        ]
        gradients = stepper.step(batches, 0.01)
        found.numbers += [gradients.loss, gradients.grad_norm, float(gradients.targets)]
        means = mean_tensors(tally.means()) if degrees.pp == 1 else over_stages(*tally.copy(), mesh.device)
        # Those that a report shows; what only `settle` reads is seen in the final weights.
        found.statistics = {name: value for name, value in means.items() if value.dim() < 2}
        update_non_gradient_state(network, means, ShardedWeightWriter(network))
    found.gradients = {rest.name: (_at(rest), given) for rest, given in zip(rests, optimizer.first, strict=True)}
    held_out = [
        (shard_over_cp(held_out_batch(objective, micro, steps, number, apart), spread), True)
        for number in range(mesh.data_rank, 4, mesh.degrees.dp)
    ]
    bytes_each = torch.ones(VOCABULARY, dtype=torch.long)
    evaluation = evaluate(network, objective, held_out, bytes_each, stages=mesh.degrees.pp)
    found.numbers += [evaluation.loss, *evaluation.metrics.values()]
    found.ended = _pieces(every)
    return found


class _Watched:
    """An optimizer that keeps the first gradients that it is given."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.first: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        self.first = self.first or [one.clone() for one in gradients]
        self.optimizer.step(gradients, lr)

    def set_progress(self, progress: float) -> None:
        self.optimizer.set_progress(progress)

    def scaled_step(self, gradients: Sequence[Tensor], lr: float, scale: float) -> None:
        self.first = self.first or [one.clone() for one in gradients]
        self.optimizer.scaled_step(gradients, lr, scale)


def _mesh(config: axes.MeshConfig, here: RankInfo) -> Mesh:
    """A rank has one mesh of some degrees for as long as its process group, as a run does: each group has threads."""
    degrees = axes.resolve(config, here.world)
    device = torch.device("cpu")
    return Mesh(here, degrees, device) if here.is_single_process else _mesh_of(dist.group.WORLD, here, degrees)


@functools.lru_cache(maxsize=4)
def _mesh_of(group: dist.ProcessGroup, here: RankInfo, degrees: axes.Degrees) -> Mesh:
    return build_mesh(here, degrees, torch.device("cpu"), datetime.timedelta(seconds=60))


def batch_of(
    objective: Objective, micro: int, step: int, number: int, tally: Stats | None, apart: bool, *, noisy: bool = True
) -> Batch:
    """Micro-batch `number` of a step: the same samples, documents (if kept `apart`) and noise whoever reads it."""
    generator = torch.Generator().manual_seed(seed_of(SEED, step, number))
    traits = OBJECTIVES.of(objective.config).traits
    pairs = traits.samples == "pairs"
    length = objective.length + (TARGET_LENGTH if pairs else 0 if traits.labels else 1)
    tokens = torch.randint(19, VOCABULARY, (micro, length), generator=generator)
    documents = (torch.rand(tokens.shape, generator=generator) < 0.1).long().cumsum(1)
    if pairs:
        sides = (objective.length, TARGET_LENGTH)
        used = [torch.randint(1, side + 1, (micro, 1), generator=generator) for side in sides]
        documents = torch.cat([(torch.arange(side) >= most).long() for side, most in zip(sides, used, strict=True)], 1)
    if OBJECTIVES.of(objective.config).traits.samples == "sentences":
        most = objective.length - 3
        tokens = torch.randint(19, VOCABULARY, (micro, 2 * most), generator=generator)
        documents = torch.tensor([[0] * 5 + [1] * (most - 7) + [2] * (most - 6) + [3] * 8]).expand(micro, -1)
    labels = {}
    if traits.labels is not None:
        used = torch.randint(1, length + 1, (micro, 1), generator=generator)
        documents = (torch.arange(length) >= used).long()
        labels["labels"] = labels_of(traits.labels, documents, generator)
    index = torch.arange(micro) + (step * BATCH + number * micro)
    noise = (
        {
            "rng_seed": seed_of(SEED, "noise", step, number),
            "aux_loss_weight": micro / BATCH,
            "stats": tally,
            "label_smoothing": objective.config.label_smoothing,
            "z_loss_weight": objective.config.z_loss_weight,
        }
        if noisy
        else {}
    )
    return objective.batch(tokens, documents if apart else None, index, **noise, **labels)


def held_out_batch(objective: Objective, micro: int, step: int, number: int, apart: bool) -> Batch:
    """Micro-batch `number` of an evaluation."""
    batch = batch_of(objective, micro, step, number, None, apart, noisy=False)
    return batch.with_places(torch.arange(micro) + number * micro)


def labels_of(kind: str, documents: Tensor, generator: torch.Generator) -> Tensor:
    """Labels of examples, of two classes or tags, or scores."""
    if kind == "score":
        return torch.rand(len(documents), 1, generator=generator, dtype=torch.float64)
    shape = documents.shape if kind == "tags" else (len(documents), 1)
    drawn = torch.randint(2, shape, generator=generator)
    return torch.where(documents == 0, drawn, -100) if kind == "tags" else drawn


def _pieces(rests: list[ShardedParameter]) -> dict[str, Piece]:
    return {rest.name: (_at(rest), rest.local.clone()) for rest in rests}


def _at(rest: ShardedParameter) -> tuple[int, ...]:
    return local_shape_and_offset(rest.parameter)[1]


def alone(pool: Pool, model: dict[str, Any], **sections: Any) -> Found:
    """The run of one process: made once for a model and sections, however many layouts are compared with it."""
    key = json.dumps([model, sections], sort_keys=True, default=repr)
    known = _KNOWN.setdefault(pool, {})
    if key not in known:
        known[key] = pool.run(trained, 1, model, {}, **sections)[0]
    return known[key]


_KNOWN: weakref.WeakKeyDictionary[Pool, dict[str, Found]] = weakref.WeakKeyDictionary()
"""Runs of one process, by their model and sections; no test changes one."""


def same(pool: Pool, one: Found, ranks: int, model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> None:
    """Train on so many ranks: starts bit-equal to `one`, all numbers and the final weights equal to 1e-9."""
    compare(one, pool.run(trained, ranks, model, parallel, **sections))


def compare(one: Found, everyone: list[Found]) -> None:
    """Compares what every rank saw and held with one process."""
    for name, (_, value) in one.started.items():
        pieces = [found.started[name] for found in everyone if name in found.started]
        held = {offset: piece.numel() for offset, piece in pieces if piece.numel()}
        assert sum(held.values()) == value.numel(), (name, held)
    for rank, found in enumerate(everyone):
        assert found.ended.keys() == found.started.keys() <= one.started.keys()
        for name, (offset, piece) in found.started.items():
            assert torch.equal(piece, within(one.started[name][1], offset, piece)), (rank, name)
        for number, expected in zip(found.numbers, one.numbers, strict=True):
            assert math.isclose(number, expected, rel_tol=TOLERANCE), (rank, found.numbers, one.numbers)
        assert found.statistics.keys() == one.statistics.keys()
        for name, value in found.statistics.items():
            # They are kept in single precision.
            assert torch.allclose(value, one.statistics[name], rtol=1e-5, atol=1e-6), (rank, name)
        for name, (offset, piece) in found.gradients.items():
            wanted = one.gradients[name][1]
            scale = max(wanted.abs().max().item(), 1e-5)
            assert _apart(piece, within(wanted, offset, piece)) <= TOLERANCE * scale, (rank, "gradient", name)
        for name, (offset, piece) in found.ended.items():
            wanted = one.ended[name][1]
            scale = max(wanted.abs().max().item(), 1.0)
            difference = _apart(piece, within(wanted, offset, piece))
            assert difference <= TOLERANCE * scale, (rank, name, difference)


def _apart(piece: Tensor, wanted: Tensor) -> float:
    return (piece - wanted).abs().max().item() if piece.numel() else 0.0


def within(whole: Tensor, offset: tuple[int, ...], piece: Tensor) -> Tensor:
    """The box of `whole` where the piece lies."""
    for dim, (first, size) in enumerate(zip(offset, piece.shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole
