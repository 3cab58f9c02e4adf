"""Python's garbage collector under control: all ranks collect after the same steps, and none in the middle of one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """A context in which cyclic garbage is collected every `every_steps` steps; 0: whenever Python likes.

    A collection walks through all objects. Left to Python each rank has a moment of its own for it, and the others wait
    for that rank in the next collective. What exists when the context is entered, such as the model, is never walked.
    """

    def __init__(self, every_steps: int) -> None:
        self._every, self._was_enabled = every_steps, True

    def __enter__(self) -> "GarbageCollection":
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
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
