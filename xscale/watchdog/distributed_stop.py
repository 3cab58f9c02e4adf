"""The stop signals of all ranks: work between steps asks at each batch, and all ranks leave it at the same one."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from xscale.mesh.collectives import PendingSum, sum_scalars
from xscale.watchdog.watchdog import StopSignal

T = TypeVar("T")


class StopRequested(BaseException):
    """Leave the work between steps, since some rank has a stop signal; raised on all ranks at the same batch.

    It is no Exception: a library that catches errors on the way, such as one that evaluates tasks, must not keep it.
    """


class DistributedStop:
    """Whether a stop signal came to any rank, with the same answer on all of them.

    In a training step the question rides in a reduction of the step: `flag` goes in, and `agree` gets the sum. Anything
    else calls `check`, or takes its batches from `batches`; both are collective.
    """

    def __init__(self, signal: StopSignal, device: torch.device) -> None:
        """`device`: where the default group's collectives take tensors."""
        self.cause: str | None = None
        """Why all ranks stop; None: none has a signal, as far as all ranks know."""
        self._signal, self._device = signal, device

    @property
    def flag(self) -> bool:
        """Whether this rank has a signal."""
        return self._signal.cause is not None

    @property
    def seconds(self) -> float:
        """Seconds since the first signal to this rank; 0 before it."""
        return self._signal.seconds

    def agree(self, count: float) -> None:
        """Take the number of ranks that have a signal, the same on all ranks."""
        if count and self.cause is None:
            self.cause = self._signal.cause or "a signal to another rank"

    def request(self, cause: str) -> None:
        """Stop for a cause that all ranks know of."""
        self.cause = self.cause or cause

    def check(self) -> None:
        """Raise StopRequested where any rank has a signal. Collective; the host waits for the answer."""
        if self.cause is None:
            self.agree(sum_scalars([float(self.flag)], self._device)[0])
        if self.cause is not None:
            raise StopRequested(self.cause)

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; StopRequested before one of them where any rank has a signal. Collective.

        The answer is read one batch after the question, so that the host never waits for a batch of the device.
        """
        pending: PendingSum | None = None
        for batch in batches:
            before, pending = pending, PendingSum([float(self.flag)], self._device)
            if before is not None:
                self.agree(before.wait()[0])
            if self.cause is not None:
                raise StopRequested(self.cause)
            yield batch
