"""Work that is due after a step, in one order: after every step, the last one, and one with a cause to stop.

1. report: the row of the metrics, the kernels of the first step, the saves that are done.
2. agree: all ranks learn of stop signals, of a lost run folder, which ends the run, and of the next targets.
3. garbage collection: on all ranks after the same step.
4. rollback: restore the last good checkpoint, if the step's decision says so. Nothing below is due for such a step.
5. limit: `train.stop_after` is a cause to stop from here on, as a signal is.
6. profile, evaluation, tasks: work that a cause to stop defers or interrupts. The state names what is not done.
7. save: where the config says so, after the last step, and with a cause to stop.
8. copy to memory: where the config says so and the step is not saved.
9. samples, bleu: after the last save of the last step.

So with a cause to stop the step is saved first, and the work that was due is done by the process that resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from xscale.run.state import State
from xscale.settings.settings import TrainConfig
from xscale.train.after_step.rank_facts import RankFacts
from xscale.train.after_step.rollback import Rollback
from xscale.train.after_step.run_saver import RunSaver
from xscale.train.after_step.step_reporter import StepReporter
from xscale.train.garbage_collection import GarbageCollection
from xscale.train.interruptible_work import InterruptibleWork
from xscale.train.optimizer_step.optimizer_step import TakenStep
from xscale.watchdog.distributed_stop import DistributedStop


@dataclass(frozen=True)
class Due:
    """An entry of the order."""

    names: tuple[str, ...]
    is_due: Callable[[TakenStep], bool]
    do: Callable[[TakenStep], object]


@dataclass
class DueWork:
    """Does what is due after a step, before the first and after the last. Collective."""

    train: TrainConfig
    state: State
    last_step: int
    """The last step that this process takes."""
    stop: DistributedStop
    reporter: StepReporter
    facts: RankFacts
    garbage: GarbageCollection
    rollback: Rollback
    work: InterruptibleWork
    saver: RunSaver

    def order(self) -> tuple[Due, ...]:
        """Return what may be due after a step, in its order."""
        return (
            Due(("report",), _always, self._report),
            Due(("agree",), _always, self._agree),
            Due(
                ("garbage collection",), _always, lambda _: self.garbage.after_step(self.state.step)
            ),
            Due(("rollback",), _is_undone, self._roll_back),
            Due(("limit",), self._is_limit, lambda _: self.stop.request("train.stop_after")),
            Due(self.work.names(), _is_kept, lambda _: self._work_after_step()),
            Due(("save",), self._is_save_due, lambda _: self.saver.save(must=self.saver.is_last)),
            Due(("copy to memory",), self._is_copy_due, lambda _: self.saver.save_in_memory()),
        )

    def before_first_step(self) -> None:
        """Save the beginning of a run that may be rolled back to it, and do what the process before left undone."""
        if self.rollback.is_possible and not self.state.step:
            self.saver.save(must=True)
        with self.work.interruptible():
            self.stop.check()  # a signal may have come during the set-up
        self._do_work()

    def after(self, step: TakenStep) -> None:
        """Do what is due after a step."""
        for due in self.order():
            if due.is_due(step):
                due.do(step)

    def at_end(self) -> None:
        """Do the work of the end of the run, if this was its last step."""
        if self.state.step == self.train.steps:
            self.work.find_due_at_end()
            self._do_work()

    def _report(self, step: TakenStep) -> None:
        self.reporter.report(step)
        self.reporter.report_kernels()
        self.saver.report_finished()

    def _agree(self, step: TakenStep) -> None:
        self.facts.agree(step.gradients.sums, is_good=_is_kept(step))

    def _roll_back(self, step: TakenStep) -> None:
        with self.work.interruptible():
            self.rollback.restore(step.decision.reason)

    def _is_limit(self, step: TakenStep) -> bool:
        return _is_kept(step) and self.train.steps > self.state.step >= self.last_step

    def _work_after_step(self) -> None:
        self.work.find_due()
        self._do_work()

    def _do_work(self) -> None:
        self.work.do()
        self.reporter.report_kernels()

    def _is_save_due(self, step: TakenStep) -> bool:
        return _is_kept(step) and self.saver.is_due

    def _is_copy_due(self, step: TakenStep) -> bool:
        return _is_kept(step) and self.saver.is_due_in_memory


def _always(step: TakenStep) -> bool:
    return True


def _is_undone(step: TakenStep) -> bool:
    """Whether the run is to be rolled back from the step."""
    return step.decision.action == "rollback"


def _is_kept(step: TakenStep) -> bool:
    return not _is_undone(step)
