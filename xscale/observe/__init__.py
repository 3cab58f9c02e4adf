"""Observers of training: they receive frozen reports on rank 0 and change nothing."""

from xscale.observe.config import ObserveConfig
from xscale.observe.events import (
    EndReport,
    EvalReport,
    RunFacts,
    SampleReport,
    Statistic,
    StepReport,
    TaskReport,
)
from xscale.observe.observer import Observer, ObserverGroup

__all__ = [
    "EndReport",
    "EvalReport",
    "ObserveConfig",
    "Observer",
    "ObserverGroup",
    "RunFacts",
    "SampleReport",
    "Statistic",
    "StepReport",
    "TaskReport",
]
