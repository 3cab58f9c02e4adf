"""The training loop: what changes the run stands here, from the first step to the last."""

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from xscale.checkpoint.background import Background
from xscale.core.config import encode
from xscale.core.errors import FaultError
from xscale.data.samples import Samples
from xscale.mesh.collectives import mean_tensors, sum_scalars
from xscale.nn.moe.settle import settle
from xscale.nn.moe.statistics import faulty
from xscale.nn.tokens import Tally
from xscale.objective import Batch
from xscale.parallel.rest import lay
from xscale.train.evaluate import evaluate
from xscale.train.observe import EvalReport, Observer, StepReport
from xscale.train.setup import Parts
from xscale.train.state import State, tensors
from xscale.train.step import Stepped
from xscale.train.stop import Stop


class NonFiniteError(FaultError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Loop:
    """One process's part of the loop; all ranks run it in step."""

    parts: Parts
    state: State
    observer: Observer
    stop: Stop
    began: float
    saves: Background
    stalls: dict[int, float] = field(default_factory=dict)
    """Seconds that the loop waited for each save that has not ended."""

    def run(self) -> str | None:
        """Steps until the last one or until something asks to stop; the cause of stopping, None when done."""
        train, state = self.parts.settings.train, self.state
        first = state.step
        cause = None
        stream = self._stream(train.steps - state.step)
        while state.step < train.steps and cause is None:
            self._step(stream)
            self._tell_saves()
            cause = self._agree(state.step - first)
            last = state.step == train.steps
            every = train.eval_every
            if self.parts.validation is not None and every and (state.step % every == 0 or last):
                self._evaluate()
            every = self.parts.settings.checkpoint.every_steps
            if last or cause is not None or (every and state.step % every == 0):
                self._save(must=last or cause is not None)
        stream.close()
        return cause if state.step < train.steps else None

    def _stream(self, steps: int) -> Generator[Samples, None, None]:
        feed, batch = self.parts.feed, self.parts.settings.train.batch_size
        yield from feed.loader.stream(feed.requests(self.state.consumed, batch, steps))

    def _step(self, stream: Iterator[Samples]) -> None:
        parts, state = self.parts, self.state
        train = parts.settings.train
        start = time.perf_counter()
        tally = Tally()
        state.step += 1
        with parts.stepper.clock.phase("data"):
            batches = self._batches(stream, tally)
        lr = parts.settings.optimizer.lr * parts.schedule.factor(state.step)
        stepped = parts.stepper.step(batches, lr)
        state.consumed += train.batch_size
        state.tokens += train.batch_size * parts.settings.data.sequence_length
        means = mean_tensors(tally.means(), alike=parts.mesh.degrees.pp == 1)
        if stepped.finite:
            settle(parts.model, means, lay)
        self._count(stepped, means)
        self._report(stepped, lr, means, time.perf_counter() - start)

    def _batches(self, stream: Iterator[Samples], tally: Tally) -> list[Batch]:
        feed, size = self.parts.feed, self.parts.settings.train.batch_size
        here = size // (feed.micro_batch * feed.ranks)
        return [feed.training(next(stream), self.state.step, size, tally) for _ in range(here)]

    def _count(self, stepped: Stepped, means: dict[str, Tensor]) -> None:
        state, limit = self.state, self.parts.settings.train.nonfinite_limit
        if stepped.finite:
            state.skipped_in_a_row = 0
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        what = f"step {state.step}: the loss ({stepped.loss}) or the gradient's norm ({stepped.gradient_norm})"
        if routers := faulty(means):
            what += f", with routing that is not finite in {', '.join(routers)},"
        self.observer.message(f"{what} is not finite; the step is skipped ({state.skipped_in_a_row} in a row)")
        if state.skipped_in_a_row > limit:
            raise NonFiniteError(f"{what} is not finite, the {state.skipped_in_a_row}th in a row; the limit is {limit}")

    def _report(self, stepped: Stepped, lr: float, means: dict[str, Tensor], seconds: float) -> None:
        parts, state = self.parts, self.state
        train = parts.settings.train
        flops = parts.flops_per_sample * train.batch_size / seconds
        peak = None if parts.peak is None else parts.peak * parts.mesh.place.world
        self.observer.step(
            StepReport(
                step=state.step,
                loss=stepped.loss,
                lr=lr,
                grad_norm=stepped.gradient_norm,
                tokens=state.tokens,
                seconds=time.perf_counter() - self.began,
                step_seconds=seconds,
                tokens_per_second=train.batch_size * parts.settings.data.sequence_length / seconds,
                mfu=None if peak is None else flops / peak,
                split=parts.stepper.clock.take(),
                statistics={name: value.tolist() for name, value in means.items()},
                skipped=state.skipped,
            )
        )

    def _agree(self, taken: int) -> str | None:
        """Whether any rank was asked to stop: all of them leave after the same step."""
        limit = self.parts.settings.train.stop_after
        asked = sum_scalars([float(self.stop.cause is not None)], self.parts.mesh.device)[0] > 0
        if asked:
            return self.stop.cause or "a signal to another rank"
        return "train.stop_after" if limit is not None and taken >= limit else None

    def _evaluate(self) -> None:
        parts, state = self.parts, self.state
        assert parts.validation is not None
        start = time.perf_counter()
        batches, stages = parts.validation.evaluation(parts.evaluated), parts.mesh.degrees.pp
        found = evaluate(parts.model, parts.objective, batches, parts.token_bytes, stages)
        best = state.best_bits_per_byte
        if math.isfinite(found.bits_per_byte) and (best is None or found.bits_per_byte < best):
            state.best_bits_per_byte, state.best_step = found.bits_per_byte, state.step
        seconds = time.perf_counter() - start
        self.observer.evaluated(EvalReport(state.step, found.loss, found.perplexity, found.bits_per_byte, seconds))

    def _save(self, *, must: bool) -> None:
        """Start a save; the last one of a run is waited for and must succeed, others may fail up to a limit."""
        parts, state = self.parts, self.state
        held = tensors(parts.rests, parts.optimizer)
        started = self.saves.save(state.step, held, state.encode(parts.optimizer), encode(parts.settings), must=must)
        if started.skipped:
            self.observer.message(f"step {state.step} is not saved: the save before is still being written")
            return
        self.stalls[state.step] = started.stall_seconds
        begin = time.perf_counter()
        if must:
            self.saves.finish()
        elif not parts.settings.checkpoint.asynchronous:
            self.saves.settle()
        self.stalls[state.step] += time.perf_counter() - begin
        self._tell_saves()

    def _tell_saves(self) -> None:
        for ended in self.saves.ended():
            stall = self.stalls.pop(ended.step, 0.0)
            if ended.path is not None:
                self.observer.saved(ended.step, ended.path, stall)
            else:
                self.observer.message(f"step {ended.step} could not be saved: {ended.error}; training goes on")
