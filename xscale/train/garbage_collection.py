"""Python's garbage collector under control: all ranks collect after the same steps, and none in the middle of one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 1000
"""Objects at most that an interpreter freezes as it starts: Python 3.12 does with 375, others with none."""


class GarbageCollection:
    """A context in which cyclic garbage is collected every `every_steps` steps; 0: whenever Python likes.

    A collection walks through all objects. Left to Python each rank has a moment of its own for it, and the others wait
    for that rank in the next collective. What exists when the context is entered, such as the model, is never walked,
    unless the caller has frozen objects of its own: only all of them could be let go again.
    """

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        self._was_enabled = self._freezes = True

    def __enter__(self) -> "GarbageCollection":
        if self._every:
            self._was_enabled = gc.isenabled()
            self._freezes = gc.get_freeze_count() <= FROZEN_BY_PYTHON
            gc.collect()
            if self._freezes:
                gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
            if self._freezes:
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if it is time."""
        if self._every and step % self._every == 0:
            gc.collect()

    @contextmanager
    def automatic(self) -> Iterator[None]:
        """Let Python collect by itself in the body, which is no step and may make much garbage."""
        if self._every:
            gc.enable()
        try:
            yield
        finally:
            if self._every:
                gc.disable()
