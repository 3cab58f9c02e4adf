"""Ctrl-C and the cluster's signals: the step is finished, the state saved, and the process leaves by itself."""

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """While entered, remembers the first of the signals; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Stop":
        for one in SIGNALS:
            self._before[one] = signal.signal(one, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)  # type: ignore[arg-type]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.cause is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.cause = self.cause or signal.Signals(number).name
