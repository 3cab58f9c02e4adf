"""A run's work between steps and at its end: profile, evaluation, tasks, samples, BLEU."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from xscale.core.errors import ConfigError
from xscale.evaluate.bleu import bleu_at_end
from xscale.evaluate.evaluate import Evaluation, evaluate
from xscale.evaluate.tasks import report_tasks
from xscale.generate.generate import encode_prompts, write_samples
from xscale.observe import EvalReport, Observer
from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.train.interruptible_work import Work
from xscale.train.profiler import StepProfiler
from xscale.watchdog.distributed_stop import DistributedStop
from xscale.watchdog.watchdog import Watchdog


@dataclass(frozen=True)
class RunWork:
    """The kinds of work of one run: `table` has them in their order."""

    parts: RunParts
    state: State
    observer: Observer
    stop: DistributedStop
    watchdog: Watchdog
    profiler: StepProfiler

    def table(self) -> dict[str, Work]:
        """Return each kind by the name under which a checkpoint says that it is to be repeated."""
        return {
            "profile": Work(
                lambda: self.profiler.is_due(stopping=self.stop.cause is not None), self._profile
            ),
            "evaluation": Work(self._evaluation_is_due, self.evaluate),
            "tasks": Work(self._tasks_are_due, self._evaluate_tasks),
            "samples": Work(self._samples_are_due, self._write_samples, at_end=True),
            "bleu": Work(self._bleu_is_due, self._report_bleu, at_end=True),
        }

    def _is_due(self, every: int) -> bool:
        step = self.state.step
        return step == self.parts.settings.train.steps or step % every == 0

    def _evaluation_is_due(self) -> bool:
        every = self.parts.settings.train.eval_every
        return self.parts.validation is not None and bool(every) and self._is_due(every)

    def _tasks_are_due(self) -> bool:
        tasks = self.parts.settings.train.tasks
        return bool(tasks.names) and self._is_due(tasks.every_steps)

    def _samples_are_due(self) -> bool:
        return bool(encode_prompts(self.parts.settings, self.parts.corpus.tokenizer))

    def _bleu_is_due(self) -> bool:
        return self.parts.settings.train.bleu_pairs > 0 and self.parts.corpus.validation is not None

    def _ask(self, phase: str) -> Callable[[], None]:
        """Return what such work calls at each batch: a heartbeat of `phase`, then StopRequested with a signal."""
        seconds = self.parts.settings.parallel.io_timeout_seconds

        def ask() -> None:
            self.watchdog.heartbeat(phase, seconds=seconds)
            self.stop.check()

        return ask

    def _profile(self) -> None:
        self._ask("profile")()
        self.profiler.write_or_repeat(self.state.step + 1)

    def evaluate(self) -> None:
        """Evaluate the model, and the average of its weights where there is one, on the validation documents."""
        parts, state = self.parts, self.state
        start = time.perf_counter()
        with parts.stepper.engine.evaluation_weights():
            result = self._evaluate_model()
        seconds = time.perf_counter() - start
        ema_loss = None
        if (ema := parts.stepper.engine.ema) is not None:
            with ema.replacing_weights():
                ema_loss = self._evaluate_model().loss
        best = state.best_bits_per_byte
        if math.isfinite(result.bits_per_byte) and (best is None or result.bits_per_byte < best):
            state.best_bits_per_byte, state.best_step = result.bits_per_byte, state.step
        numbers = (result.loss, result.perplexity, result.bits_per_byte, seconds)
        self.observer.evaluated(EvalReport(state.step, *numbers, result.metrics, ema_loss))

    def _evaluate_model(self) -> Evaluation:
        """Evaluate the model as it is. Collective."""
        parts = self.parts
        assert parts.validation is not None
        seconds = parts.settings.parallel.longest_timeout_seconds
        batches = self.watchdog.heartbeats(
            parts.validation.evaluation(parts.eval_sequences), "evaluate", seconds=seconds
        )
        names, stages = parts.validation.loader.class_names, parts.mesh.degrees.pp
        asking = self.stop.batches(batches)
        return evaluate(parts.model, parts.objective, asking, parts.token_bytes, stages, names)

    def _evaluate_tasks(self) -> None:
        """Evaluate the tasks of the config; a request that the model cannot answer is reported and ends nothing."""
        try:
            with self.parts.stepper.engine.evaluation_weights():
                report = report_tasks(self.parts, self.state.step, self._ask("tasks"))
            self.observer.tasks_evaluated(report)
        except ConfigError as error:
            # Every rank has the same refusal, before it computes anything.
            self.observer.message(
                f"step {self.state.step}: the tasks are not evaluated: {error}; training continues"
            )

    def _write_samples(self) -> None:
        with self.parts.stepper.engine.evaluation_weights():
            samples = write_samples(self.parts, self.state.step, self._ask("samples"))
        for sample in samples:
            self.observer.sampled(sample)

    def _report_bleu(self) -> None:
        with self.parts.stepper.engine.evaluation_weights():
            sentence = bleu_at_end(self.parts, self._ask("bleu"))
        if sentence is not None:
            self.observer.message(sentence)
