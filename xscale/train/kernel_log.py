"""Kernel selections of a step, for the log: which implementation of each operator ran, and why."""

import contextlib
import logging
from collections.abc import Iterator

from xscale_kernels.select import LOG, LogOnce


class KernelSelectionLog(logging.Handler):
    """Collects each selection once, from the logger of the kernels. Recording costs microseconds a call."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(LogOnce())
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the selections made in the body."""
        before = LOG.level
        LOG.addHandler(self)
        LOG.setLevel(logging.INFO)
        try:
            yield
        finally:
            LOG.setLevel(before)
            LOG.removeHandler(self)

    def drain(self) -> str:
        """Return the new selections, a line each, and forget them; empty when there are none."""
        text = "\n".join(sorted(self.sentences))
        self.sentences.clear()
        return f"kernels:\n{text}" if text else ""
