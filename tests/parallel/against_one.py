"""A few steps of training on random tokens, on any layout, to be compared with the same steps on one process."""

import datetime
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.distributed import Pool
from tests.train.tiny import recipe
from xscale.mesh import axes
from xscale.mesh.environment import Place, place
from xscale.mesh.mesh import Mesh, lay_out
from xscale.nn.init import seed_of
from xscale.nn.tokens import Tally
from xscale.objective import OBJECTIVES, Batch, Objective, Specials
from xscale.optim.optimizer import OPTIMIZERS
from xscale.parallel import context
from xscale.parallel.plan import Plan
from xscale.parallel.rest import at_rest, place_in_whole
from xscale.train.evaluate import evaluate
from xscale.train.settings import Settings
from xscale.train.setup import build_meta
from xscale.train.share import share
from xscale.train.step import Stepper, weights_of

DOUBLE = {"compute": "float64", "master": "float64"}
VOCABULARY, LENGTH, BATCH, MICRO, STEPS, SEED = 67, 23, 8, 2, 3, 5
SPECIALS = Specials(VOCABULARY, pad=0, eos=1, mask=2, sentinels=range(3, 19))
Piece = tuple[tuple[int, ...], Tensor]
"""Where in the whole it begins, and what it is."""


@dataclass
class Found:
    """What a rank saw and held."""

    numbers: list[float] = field(default_factory=list)
    """Each step's loss, gradient norm and statistics, then the loss of an evaluation."""
    started: dict[str, Piece] = field(default_factory=dict)
    ended: dict[str, Piece] = field(default_factory=dict)


def built(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> tuple[Settings, Mesh, nn.Module, Plan]:
    """This rank's part of the model of a checked recipe."""
    given: dict[str, Any] = {
        "precision": DOUBLE,
        "train": {"clip": 0.5},
        **sections,
        "data": {"sequence_length": LENGTH, **sections.get("data", {})},
    }
    settings = recipe(Path("nowhere"), model=model, parallel=parallel, **given)
    here = place()
    problems = settings.check(here.world)
    assert not problems, problems
    mesh = _mesh(settings.parallel.mesh, here)
    network = build_meta(settings, VOCABULARY)
    plan = Plan(settings.parallel, settings.precision)
    return settings, mesh, plan.apply(network, mesh, SEED), plan


def trained(
    model: dict[str, Any], parallel: dict[str, Any], *, without: str = "", steps: int = STEPS, **sections: Any
) -> Found:
    """Train on this rank of as many as there are; `without` names a collective to leave out, as `module.name`."""
    if without:
        with patch(without, lambda x, *_: x):
            return trained(model, parallel, steps=steps, **sections)
    settings, mesh, network, plan = built(model, parallel, **sections)
    spread = context.spread_of(network, mesh, settings.parallel)
    rests = at_rest(network)
    found = Found(started=_pieces(rests))
    objective: Objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    optimizer = OPTIMIZERS.build(settings.optimizer, weights_of(rests))
    world, clip, degrees = mesh.place.world, settings.train.clip, mesh.degrees
    many = {"repeats": degrees.tp, "stages": degrees.pp}
    stepper = Stepper(network, plan, objective, optimizer, rests, mesh.device, world, clip, **many)
    apart = not settings.data.cross_documents
    for step in range(steps):
        tally = Tally()
        batches = [
            share(_batch(objective, step, number, tally, apart), spread)
            for number in range(mesh.data_rank, BATCH // MICRO, mesh.degrees.dp)
        ]
        stepped = stepper.step(batches, 0.01)
        found.numbers += [stepped.loss, stepped.gradient_norm, float(stepped.targets)]
    held_out = [
        (share(_batch(objective, steps, number, None, apart, noisy=False), spread), True)
        for number in range(mesh.data_rank, 4, mesh.degrees.dp)
    ]
    bytes_each = torch.ones(VOCABULARY, dtype=torch.long)
    found.numbers.append(evaluate(network, objective, held_out, bytes_each, stages=mesh.degrees.pp).loss)
    found.ended = _pieces(rests)
    return found


def _mesh(config: axes.MeshConfig, here: Place) -> Mesh:
    degrees = axes.fill(config, here.world)
    device = torch.device("cpu")
    return Mesh(here, degrees, device) if here.alone else lay_out(here, degrees, device, datetime.timedelta(seconds=60))


def _batch(
    objective: Objective, step: int, number: int, tally: Tally | None, apart: bool, *, noisy: bool = True
) -> Batch:
    """Micro-batch `number` of a step: the same samples, documents (if kept `apart`) and noise whoever reads it."""
    generator = torch.Generator().manual_seed(seed_of(SEED, step, number))
    tokens = torch.randint(19, VOCABULARY, (MICRO, LENGTH + 1), generator=generator)
    documents = (torch.rand(tokens.shape, generator=generator) < 0.1).long().cumsum(1)
    index = torch.arange(MICRO) + (step * BATCH + number * MICRO)
    noise = {"noise": seed_of(SEED, "noise", step, number), "auxiliary": MICRO / BATCH, "tally": tally} if noisy else {}
    return objective.batch(tokens, documents if apart else None, index, **noise)


def _pieces(rests: list[Any]) -> dict[str, Piece]:
    return {rest.name: (place_in_whole(rest.parameter)[1], rest.local.clone()) for rest in rests}


def alone(pool: Pool, model: dict[str, Any], **sections: Any) -> Found:
    """The run of one process."""
    found: Found = pool.run(trained, 1, model, {}, **sections)[0]
    return found


def same(pool: Pool, one: Found, ranks: int, model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> None:
    """Train on so many ranks: starts bit-equal to `one`, all numbers and the final weights equal to 1e-9."""
    compare(one, pool.run(trained, ranks, model, parallel, **sections))


def compare(one: Found, everyone: list[Found]) -> None:
    """What every rank saw and held against what one process did."""
    for name, (_, value) in one.started.items():
        pieces = [found.started[name] for found in everyone if name in found.started]
        held = {offset: piece.numel() for offset, piece in pieces if piece.numel()}
        assert sum(held.values()) == value.numel(), (name, held)
    for rank, found in enumerate(everyone):
        assert found.ended.keys() == found.started.keys() <= one.started.keys()
        for name, (offset, piece) in found.started.items():
            assert torch.equal(piece, within(one.started[name][1], offset, piece)), (rank, name)
        for number, expected in zip(found.numbers, one.numbers, strict=True):
            assert math.isclose(number, expected, rel_tol=1e-9), (rank, found.numbers, one.numbers)
        for name, (offset, piece) in found.ended.items():
            wanted = within(one.ended[name][1], offset, piece)
            difference = (piece - wanted).abs().max().item() if piece.numel() else 0.0
            assert difference <= 1e-9 * max(1.0, one.ended[name][1].abs().max().item()), (rank, name, difference)


def within(whole: Tensor, offset: tuple[int, ...], piece: Tensor) -> Tensor:
    """The box of `whole` where the piece lies."""
    for dim, (first, size) in enumerate(zip(offset, piece.shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole
