"""Python's garbage is collected by all ranks after the same steps, within none of them, and as before afterwards."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed import Pool, distributed
from tests.train.tiny import recipe, run
from xscale.train import garbage_collection
from xscale.train.garbage_collection import GarbageCollection


@contextmanager
def as_in_training(*, enabled: bool) -> Iterator[None]:
    """Let go of what a worker of the tests has frozen; `enabled`: whether Python collects by itself."""
    before = gc.isenabled()
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()
    try:
        yield
    finally:
        gc.enable() if before else gc.disable()
        gc.freeze()


ENABLED = pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])


class Node:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def nodes() -> int:
    return sum(isinstance(item, Node) for item in gc.get_objects())


@ENABLED
@distributed(ranks=1)
def test_garbage_of_steps_is_collected_together(enabled: bool) -> None:
    with as_in_training(enabled=enabled):
        gc.collect()
        before = nodes()
        with GarbageCollection(3) as garbage:
            assert not gc.isenabled()
            counts = []
            for step in range(1, 8):
                Node()
                garbage.after_step(step)
                counts.append(nodes() - before)
            with garbage.automatic():
                assert gc.isenabled()
            assert not gc.isenabled()
        assert counts == [1, 2, 0, 1, 2, 0, 1]
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0


@ENABLED
@distributed(ranks=1)
def test_what_the_caller_has_frozen_stays_so(enabled: bool) -> None:
    with as_in_training(enabled=enabled):
        gc.freeze()
        frozen = gc.get_freeze_count()
        kept = [Node() for _ in range(3)]
        with GarbageCollection(1) as garbage:
            Node()
            garbage.after_step(1)
        assert nodes() == len(kept)
        assert frozen - 10 < gc.get_freeze_count() <= frozen
        assert gc.isenabled() == enabled
        gc.unfreeze()


@ENABLED
@distributed(ranks=1)
def test_python_may_decide(enabled: bool) -> None:
    with as_in_training(enabled=enabled):
        with GarbageCollection(0) as garbage:
            assert gc.isenabled() == enabled
            garbage.after_step(1)
            with garbage.automatic():
                assert gc.isenabled() == enabled
        assert gc.isenabled() == enabled


def steps_with_collections(folder: Path) -> list[int]:
    """Steps after which this rank collected, and 0 for a collection at another time."""
    steps, current = list[int](), [0]
    after_step, collect = GarbageCollection.after_step, gc.collect

    class Counting:
        """The module gc as the trainer sees it."""

        freeze, unfreeze, get_freeze_count = gc.freeze, gc.unfreeze, gc.get_freeze_count
        enable, disable, isenabled = gc.enable, gc.disable, gc.isenabled

        @staticmethod
        def collect() -> int:
            steps.append(current[0])
            return collect()

    def after(self: GarbageCollection, step: int) -> None:
        current[0] = step
        after_step(self, step)
        current[0] = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage_collection, "gc", Counting)
        patch.setattr(GarbageCollection, "after_step", after)
        train = {"steps": 5, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0, "gc_every_steps": 2}
        run(recipe(folder, "run", train=train))
    return steps


def test_ranks_collect_after_the_same_steps(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(steps_with_collections, 2, tmp_path) == [[0, 2, 4]] * 2
