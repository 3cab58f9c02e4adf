"""Micro-batches of a rank: each token's target is sharded over cp once, and no target is lost or counted twice."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from xscale.data.samples.loader import Loader, Samples
from xscale.nn.forward import Stats
from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import OBJECTIVES, Batch, SpecialTokens
from xscale.parallel.context import SequenceSharding
from xscale.step.batches import MicroBatches

VOCABULARY, LENGTH, RANKS = 17, 11, 2
SPECIALS = SpecialTokens(VOCABULARY, pad=0, eos=1, mask=2, sentinels=range(3, 5), bos=None)


@dataclass(frozen=True)
class RankOfGroup:
    """A rank of a group that talks to nobody."""

    of_rank: int

    def size(self) -> int:
        return RANKS

    def rank(self) -> int:
        return self.of_rank


@dataclass(frozen=True)
class CountedSharding(SequenceSharding):
    """Counts how often targets are sharded: what is filled with `IGNORE_INDEX`."""

    calls: list[int] = field(default_factory=list)

    def shard_predicted(self, full: Tensor, fill: int = 0) -> Tensor:
        self.calls.extend([fill] if fill == IGNORE_INDEX else [])
        return super().shard_predicted(full, fill)


class SamplesOfATest:
    """Samples that are their numbers."""

    def samples(self, first: int, count: int) -> Samples:
        index = torch.arange(first, first + count)
        tokens = 5 + (index[:, None] + torch.arange(LENGTH + 1)) % (VOCABULARY - 5)
        return Samples(tokens, torch.zeros_like(tokens), index, index)


def training(made: MicroBatches) -> Iterator[Batch]:
    for number in range(2):
        yield made.make(made.loader.samples(2 * number, 2), 1, 4, Stats())


def evaluation(made: MicroBatches) -> Iterator[Batch]:
    for batch, _ in made.evaluation(4):
        yield batch


@pytest.mark.parametrize("balanced", [False, True], ids=["adjacent", "zigzag"])
@pytest.mark.parametrize("kind", ["causal", "masked"])
@pytest.mark.parametrize("batches", [training, evaluation])
def test_targets_are_sharded_once(batches: Any, kind: str, *, balanced: bool) -> None:
    objective = OBJECTIVES.build(OBJECTIVES.get(kind).part.Config(), SPECIALS, LENGTH, 0)

    def made(sharding: SequenceSharding | None) -> list[Batch]:
        loader = cast(Loader, SamplesOfATest())
        return list(batches(MicroBatches(loader, objective, 2, 1, 0, 0, False, torch.device("cpu"), sharding)))

    whole, counted = made(None), [torch.zeros(0, dtype=torch.long) for _ in range(2)]
    for rank in range(RANKS):
        sharding = CountedSharding(cast(Any, RankOfGroup(rank)), balanced=balanced)
        sharded = made(sharding)
        assert sharding.calls == [IGNORE_INDEX] * len(whole), "each micro-batch shards its targets once"
        for number, batch in enumerate(sharded):
            targets = batch.targets[batch.targets != IGNORE_INDEX]
            assert batch.target_count == len(targets)
            counted[number] = torch.cat((counted[number], targets))
    for batch, targets in zip(whole, counted, strict=True):
        wanted = batch.targets[batch.targets != IGNORE_INDEX]
        assert len(wanted) > 0
        assert targets.sort().values.tolist() == wanted.sort().values.tolist()
