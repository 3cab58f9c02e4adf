"""Job J11: the headline figure of each goal, from the cases of the other jobs, on one device and one commit."""

import importlib
from dataclasses import replace

from xscale.bench.gpu.case import GpuCase, GpuContext
from xscale.bench.gpu.jobs import JOBS

LIMIT = 60.0
"""A case of this table may be silent for less long than in its own job, so that all goals get a figure."""


def cases(context: GpuContext) -> list[GpuCase]:
    """The cases of the other jobs that have a goal, the first of each goal before the second ones."""
    chosen = [
        case
        for job in JOBS
        if job.module != __name__
        for case in importlib.import_module(job.module).cases(context)
        if case.headline
    ]
    firsts = {case.headline: case for case in reversed(chosen)}
    ordered = [*(case for case in chosen if case is firsts[case.headline]), *chosen]
    return [
        replace(case, name=f"{case.name}; goal: {case.headline}", seconds=min(case.seconds, LIMIT))
        for case in dict.fromkeys(ordered)
    ]
