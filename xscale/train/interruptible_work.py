"""Work between the steps of a run and at its end: a stop signal interrupts it, and the resumed run repeats it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from xscale.parallel.shard.sharded import StagedModel
from xscale.run.state import State
from xscale.watchdog.distributed_stop import DistributedStop, StopRequested


@dataclass(frozen=True)
class Work:
    """One kind of it. It asks at each batch whether to stop, and reports what it has found once it is complete."""

    is_due: Callable[[], bool]
    """Whether it is due after the step that is done, the same on all ranks."""
    do: Callable[[], None]
    """Do it. Collective; StopRequested where it is interrupted."""
    at_end: bool = False
    """Whether it is work of the end of the run, after the last save."""


class InterruptibleWork:
    """Does what is due, in the order of the table. What is not done yet is in the state, by name, and saved with it."""

    def __init__(
        self,
        works: Mapping[str, Work],
        state: State,
        stop: DistributedStop,
        model: nn.Module,
        around: Sequence[Callable[[], AbstractContextManager[object]]] = (),
    ) -> None:
        """`around`: contexts of each piece of work."""
        self._works = works
        self._state = state
        self._stop = stop
        self._model = model
        self._around = around
        # The config that the run resumes with may have no work of such a name.
        state.pending = [name for name in state.pending if name in works]

    def names(self) -> tuple[str, ...]:
        """Return the names of the work between steps, in its order."""
        return tuple(name for name, work in self._works.items() if not work.at_end)

    def find_due(self) -> None:
        """Note what is due after the step that is done."""
        self._state.pending = [
            name for name, work in self._works.items() if not work.at_end and work.is_due()
        ]

    def find_due_at_end(self) -> None:
        """Note what is due after the last save too; no checkpoint has these names."""
        at_end = [name for name, work in self._works.items() if work.at_end and work.is_due()]
        self._state.pending = [*self._state.pending, *at_end]

    def do(self) -> None:
        """Do what is due; with a stop signal to any rank leave at the next batch of all of them. Collective."""
        while self._state.pending and self._stop.cause is None:
            with self.interruptible(), ExitStack() as contexts:
                for context in self._around:
                    contexts.enter_context(context())
                self._works[self._state.pending[0]].do()
                self._state.pending.pop(0)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Leave the body at a stop signal, with all messages between pipeline stages received."""
        try:
            yield
        except StopRequested:
            if isinstance(self._model, StagedModel):
                # The batch before was finished on every rank.
                self._model.wait_sends()
