"""Saves of a run, on the disk and in memory: when they are due, how long the loop waits, and what became of them."""

import time
from dataclasses import dataclass, field

from xscale.checkpoint.async_saver import AsyncSaver
from xscale.checkpoint.in_memory import InMemoryCheckpoint
from xscale.core.config import encode
from xscale.observe import Observer
from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.train.after_step.rank_facts import RankFacts
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import Watchdog


@dataclass
class RunSaver:
    """Starts the saves of a run and reports those that are done. Collective."""

    parts: RunParts
    state: State
    saves: AsyncSaver
    memory: InMemoryCheckpoint | None
    facts: RankFacts
    stop: DistributedStop
    watchdog: Watchdog
    observer: Observer
    saved_step: int | None = field(init=False, default=None)
    """The step of the last save of this process, which is done or in flight."""
    _stalls: dict[int, float] = field(init=False, default_factory=dict)
    """Seconds that the loop waited for each save in flight, by step."""

    @property
    def is_last(self) -> bool:
        """Whether the step that is done is the last of this process, which is saved for certain."""
        return self.stop.cause is not None or self.state.step == self.parts.settings.train.steps

    @property
    def is_due(self) -> bool:
        """Whether the step that is done is to be saved on the disk."""
        every = self.parts.settings.checkpoint.every_steps
        return self.is_last or bool(every and self.state.step % every == 0)

    @property
    def is_due_in_memory(self) -> bool:
        """Whether it is to be copied to memory; a save on the disk is enough by itself."""
        every = self.parts.settings.checkpoint.memory_every_steps
        return self.memory is not None and not self.is_due and self.state.step % every == 0

    def save(self, *, must: bool) -> None:
        """Start a save. One that `must` succeed is waited for; of the others some may fail, up to a limit."""
        parts, state = self.parts, self.state
        self.watchdog.heartbeat("save", seconds=parts.settings.parallel.longest_timeout_seconds)
        engine = parts.stepper.engine
        tensors = parts.state_tensors()
        counters, config = state.encode(engine), encode(parts.settings)
        in_flight = self.facts.ranks_that_save > 0
        started = self.saves.save(
            state.step,
            tensors,
            counters,
            config,
            required=must,
            copy_in_background=True,
            in_flight=in_flight,
        )
        if started.skipped:
            self.observer.message(
                f"step {state.step} is not saved: the previous save is still in flight"
            )
            return
        self.saved_step = state.step
        self._stalls[state.step] = started.stall_seconds
        begin = time.perf_counter()
        if must:
            self.saves.close()
        elif not parts.settings.checkpoint.asynchronous:
            self.saves.wait()
        self._stalls[state.step] += time.perf_counter() - begin
        self.report_finished()

    def save_in_memory(self) -> None:
        """Copy the state into memory that outlives this process."""
        assert self.memory is not None, "the config wants no checkpoint in memory"
        parts, state = self.parts, self.state
        self.watchdog.heartbeat(
            "save in memory", seconds=parts.settings.parallel.longest_timeout_seconds
        )
        engine = parts.stepper.engine
        self.saves.save_in_memory(
            self.memory, state.step, parts.state_tensors(), state.encode(engine)
        )

    def wait_for_copy(self) -> None:
        """Wait until the save in flight has copied the weights, which the update is about to change."""
        seconds = self.saves.wait_copied()
        if self.state.step - 1 in self._stalls:
            self._stalls[self.state.step - 1] += seconds

    def wait(self) -> None:
        """Wait for the save in flight, and report it."""
        self.saves.wait()
        self.report_finished()

    def report_finished(self) -> None:
        """Report the saves that are done since the last call."""
        for save in self.saves.finished():
            stall = self._stalls.pop(save.step, 0.0)
            action = "kept in memory" if save.in_memory else "saved"
            if save.path is not None and save.in_memory:
                continue
            if save.path is not None:
                self.observer.saved(save.step, save.path, stall)
            else:
                self.observer.message(
                    f"step {save.step} could not be {action}: {save.error}; training continues"
                )
