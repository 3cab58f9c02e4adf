"""Agreement of a pipeline's stages: a step that is not taken, and the number format."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, batch_of, built
from tests.parallel.models import DENSE, changed
from xscale.nn.head.head import Head
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.pipeline.p2p import P2PChannel
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.step.stepper import Stepper
from xscale.train.setup import make_engine

MODEL = changed(DENSE, tied=False)
HALF = {"compute": "bfloat16", "master": "float32"}
PP = {"mesh": {"pp": 2}}


def steps(parallel: dict[str, Any], poisoned: int | None, **sections: Any) -> tuple[list[tuple[float, bool]], bool]:
    """Loss of each of three steps and whether it was taken; and whether the poisoned one moved a parameter here."""
    settings, mesh, network, _ = built(MODEL, parallel, train={"micro_batch_size": 2}, **sections)
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    rests = sharded_parameters(network)
    repeats = mesh.degrees.tp * mesh.degrees.pp
    stepper = Stepper(make_engine(settings, network, rests, mesh), objective, mesh.device, repeats)
    apart = not settings.data.cross_documents
    scale = [1.0]
    for head in [one for one in network.modules() if isinstance(one, Head)]:
        summed = head.cross_entropy
        head.cross_entropy = lambda *given, summed=summed: summed(*given) * scale[0]  # type: ignore[misc]
    found, moved = [], False
    for step in range(3):
        batches = [batch_of(objective, 2, step, number, None, apart) for number in range(4)]
        before = [rest.local.clone() for rest in rests]
        scale[0] = math.inf if step == poisoned else 1.0
        gradients = stepper.step(batches, 0.01)
        found.append((gradients.loss, gradients.finite))
        if step == poisoned:
            moved = any(not torch.equal(one, rest.local) for one, rest in zip(before, rests, strict=True))
    return found, moved


def test_a_step_that_is_not_finite_is_left_out_on_all_stages(pool: Pool) -> None:
    """Only the last stage sees the loss; the next step goes on from the same parameters as one process does."""
    ((alone, _),) = pool.run(steps, 1, {}, 1)
    for found, moved in pool.run(steps, 2, PP, 1):
        assert not moved
        assert [taken for _, taken in found] == [True, False, True]
        assert [loss for loss, taken in found if taken] == pytest.approx(
            [loss for loss, taken in alone if taken], rel=1e-9
        )
    # And that what is poisoned is what is left out.
    ((whole, _),) = pool.run(steps, 1, {}, None)
    assert whole[2][0] != pytest.approx(alone[2][0], rel=1e-6)


def formats() -> tuple[list[tuple[float, bool]], set[torch.dtype], set[torch.dtype]]:
    """Losses, the formats of what stages send each other, and of parameters at rest and their gradients."""
    sent: set[torch.dtype] = set()
    true = P2PChannel.send

    def send(edges: P2PChannel, to: int, key: Any, tensors: list[Tensor]) -> None:
        sent.update(one.dtype for one in tensors)
        true(edges, to, key, tensors)

    with patch.object(P2PChannel, "send", send):
        found, _ = steps(PP, None, precision=HALF)
    network = built(MODEL, PP, precision=HALF)[2]
    return found, sent, {rest.local.dtype for rest in sharded_parameters(network)}


def test_stages_send_bfloat16_and_keep_masters_in_float32(pool: Pool) -> None:
    ((alone, _),) = pool.run(steps, 1, {}, None, precision=HALF)
    for found, sent, kept in pool.run(formats, 2):
        assert (sent, kept) == ({torch.bfloat16}, {torch.float32})
        # Only the order of sums over micro-batches in float32 differs.
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in alone], rel=2e-3)
