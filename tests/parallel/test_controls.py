"""Negative controls: each collective left out, one at a time, and the comparison with one process goes red.

The starts agree and every rank ends, so what goes red are the numbers.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, compare, same, trained
from tests.parallel.models import DENSE, MIXTURE, changed
from xscale.parallel.pipeline.p2p import P2PChannel

WINDOW = {"kind": "block_sparse", "block": 2, "pattern": {"kind": "window", "window": 5}}
SMALL = {
    "dense": changed(DENSE, stack__depth=2),
    "untied": changed(DENSE, stack__depth=2, tied=False),
    "mixture": changed(MIXTURE, stack__depth=2),
    "linear": changed(DENSE, stack__depth=2, stack__block__mixer__core={"kind": "linear"}),
    "window": changed(DENSE, stack__depth=2, stack__block__mixer__core=WINDOW),
}


def itself(x: Tensor, *_: Any) -> Tensor:
    return x


class Stays:
    """Replaces what is passed on: nothing is."""

    def __init__(self, x: Tensor, group: object) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


def first_piece(x: Tensor, dim: int, group: Any) -> Tensor:
    """Replaces a sum that is scattered: this rank's piece of its own part."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def repeated(x: Tensor, dim: int, group: Any) -> Tensor:
    """Replaces what is gathered: what is here, again and again."""
    return torch.cat([x] * group.size(), dim)


def whole_again(x: Tensor, length: int, group: Any) -> Tensor:
    """The same, along the sequence."""
    return x.repeat(1, group.size(), 1)


def zeros(rows: Tensor, outgoing: list[int], incoming: list[int], group: object) -> Tensor:
    """Replaces rows that travel: as many arrive, with nothing in them."""
    return rows.new_zeros((sum(incoming), *rows.shape[1:])) + 0 * rows.sum()


def own_norm(values: Tensor) -> Tensor:
    """Replaces the sums of loss and norm over ranks: those of this rank."""
    return values


def lost(edges: P2PChannel, source: int, key: Hashable) -> list[Tensor]:
    """Replaces a message between stages: as large, with nothing in it."""
    return [torch.zeros_like(one) for one in RECEIVE(edges, source, key)]


def kept(model: Any, config: object, *, last: bool) -> None:
    """Replaces the mark of the last micro-batch: none is the last."""
    model.set_requires_gradient_sync(False)


def local_draw(numbers: object, make: Any, shape: tuple[int, ...], *_: Any) -> Tensor:
    """Replaces a draw for the whole sequence: one of this rank's shard."""
    drawn: Tensor = make(shape)
    return drawn


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a function without a result."""


RECEIVE = P2PChannel.recv


@dataclass(frozen=True)
class Control:
    """Communication that is left out, and a run that needs it."""

    target: str
    """Below xscale."""
    stead: Any
    model: str
    parallel: dict[str, Any]


TP, SP, EP = {"mesh": {"tp": 2}}, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}, {"mesh": {"ep": 2}}
PP, DP = {"mesh": {"pp": 2}}, {"mesh": {"dp_shard": 2}}
ULYSSES, RING, HALO, SCAN = (
    {"mesh": {"cp": 2}, "context": {"style": style}} for style in ("ulysses", "ring", "halo", "scan")
)
CONTROLS = {
    "an input's gradient, summed": Control("parallel.shard.region.copy_in", itself, "dense", TP),
    "a region's output, summed": Control("parallel.shard.region.sum_out", itself, "dense", TP),
    "words looked up, summed": Control("parallel.tensor.vocabulary.sum_out", itself, "dense", TP),
    "a loss over all words": Control("parallel.tensor.vocabulary.all_gather", repeated, "dense", TP),
    "whole weights inside regions": Control("parallel.tensor.table.all_reduce_replicated_grads", nothing, "dense", TP),
    "whole weights between regions": Control(
        "parallel.tensor.sequence.all_reduce_replicated_grads", nothing, "dense", SP
    ),
    "a sum scattered": Control("mesh.collectives.reduce_scatter", first_piece, "dense", SP),
    "a sequence gathered": Control("mesh.collectives.all_gather", repeated, "dense", SP),
    "an auxiliary loss, shared by a region": Control(
        "parallel.shard.region._scale_auxiliary_loss", itself, "mixture", TP
    ),
    "rows to their experts": Control("parallel.expert.all_to_all", zeros, "mixture", EP),
    "heads for tokens": Control("parallel.context.ulysses.all_to_all", itself, "dense", ULYSSES),
    "keys round the ranks": Control("parallel.context.ring.ring.ring_send", Stays, "dense", RING),
    "key blocks in sight": Control("parallel.context.halo.all_to_all", zeros, "window", HALO),
    "states of the ranks before": Control("parallel.context.scan.all_gather", repeated, "linear", SCAN),
    "a micro-batch, for its router": Control(
        "parallel.context.sequence_sharding.gather_in", whole_again, "mixture", ULYSSES
    ),
    "noise of the whole sequence": Control(
        "parallel.context.sequence_sharding.TokensOverContext.draw", local_draw, "dense", ULYSSES
    ),
    "what a stage gives the next": Control("parallel.pipeline.p2p.P2PChannel.recv", lost, "untied", PP),
    "a table's gradients, over stages": Control(
        "parallel.pipeline.executor.Pipeline._all_reduce_shared_grads", nothing, "dense", PP
    ),
    "gradients, over samples": Control("parallel.shard.zero.set_gradient_sync", kept, "untied", DP),
    "the norm, over ranks": Control("parallel.engine.fsdp.sum_tensor", own_norm, "untied", DP),
    "a copy's part of the norm": Control("parallel.shard.sharded.ShardedParameter.shards", 1, "dense", TP),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes of its own: what a left-out collective leaves behind in one must not reach other tests."""
    own = Pool()
    yield own
    own.close()


@pytest.fixture(scope="module")
def one(pool: Pool) -> dict[str, Found]:
    """The runs of one process."""
    return {name: alone(pool, model, steps=1) for name, model in SMALL.items()}


def without(name: str) -> Found:
    """Train on this rank with that collective left out."""
    control = CONTROLS[name]
    with patch(f"xscale.{control.target}", control.stead):
        return trained(SMALL[control.model], control.parallel, steps=1)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.sampled(2)
def test_without_one_collective_the_numbers_differ(name: str, one: dict[str, Found], pool: Pool) -> None:
    everyone = pool.run(without, 2, name)
    with pytest.raises(AssertionError):
        compare(one[CONTROLS[name].model], everyone)


@pytest.mark.long
def test_with_all_of_them_the_numbers_agree(one: dict[str, Found], pool: Pool) -> None:
    """The control of the controls: what fails above is what was left out."""
    for control in {(one.model, str(one.parallel)): one for one in CONTROLS.values()}.values():
        same(pool, one[control.model], 2, SMALL[control.model], control.parallel, steps=1)
