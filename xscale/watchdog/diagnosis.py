"""Hang diagnosis: which rank made the run stop, from the reports of the ranks that still answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MAX_RANKS_LISTED = 8
"""How many ranks a sentence lists."""


@dataclass(frozen=True)
class Collective:
    """A collective operation that a rank has started."""

    name: str
    group: str
    ranks: tuple[int, ...]
    number: int
    """Sequence number in its process group."""

    def __str__(self) -> str:
        ranks = f" of {listed(self.ranks)}" if self.ranks else ""
        return f"{self.name} (number {self.number} of group {self.group}{ranks})"


@dataclass(frozen=True)
class RankReport:
    """The state of one rank when the run is about to stop."""

    rank: int
    kind: Literal["hangs", "asked", "lost", "failed"]
    """hangs: it made no progress for too long. asked: another rank reported. lost: its connection to another rank
    broke. failed: it raised an exception of its own."""
    step: int
    phase: str
    seconds: float
    """Since its last heartbeat."""
    frame: str
    """Innermost Python frame: file, line and function."""
    in_wait: bool
    """Whether that frame waits for another rank."""
    collectives: tuple[Collective, ...] = ()
    """Collectives that it has started and not completed, the oldest first: it waits in that one."""
    reached: Mapping[str, int] = field(default_factory=dict)
    """Process group -> number of the last collective that it started there."""
    text: str = ""
    """The exception, for `failed` and `lost`."""
    message: str = ""
    """The message of a pipeline that it waits for: its direction, contents and peer."""

    @property
    def position(self) -> str:
        return f"step {self.step} ({self.phase})"


def diagnose(reports: Mapping[int, RankReport], world: int) -> str:
    """Name the rank at fault, its step, and the collective that the others wait in, in one sentence."""
    for report in reports.values():
        if report.kind == "failed":
            return f"rank {report.rank} failed at {report.position}: {report.text}"
    waiting = [report for report in reports.values() if report.collectives]
    silent = tuple(rank for rank in range(world) if rank not in reports)
    if silent:
        witness = waiting[0] if waiting else next(iter(reports.values()), None)
        sentence = f"{listed(silent)} {'does' if len(silent) == 1 else 'do'} not answer: killed, stopped or cut off"
        if witness is None:
            return sentence
        return f"{sentence}; rank {witness.rank} was at {witness.position}{_in(witness)}"
    for report in waiting:
        for collective in report.collectives:
            absent = [
                rank
                for rank in collective.ranks
                if reports[rank].reached.get(collective.group, -1) < collective.number
            ]
            if hanging := [reports[rank] for rank in absent if _is_idle(reports[rank])]:
                return f"{_hangs(hanging)}; {_waiters(reports, collective)}"
    if idle := [report for report in reports.values() if _is_idle(report)]:
        busy = [report for report in reports.values() if report not in idle]
        return _hangs(idle) + (f"; {_positions(busy)}" if busy else "")
    if waiting and (stuck := _stuck_in(waiting[0], reports)) is not None:
        return f"{stuck}, which all of its ranks have started: a GPU or the network between them is stuck"
    return f"the ranks wait for each other: {_positions(list(reports.values()))}"


def _stuck_in(report: RankReport, reports: Mapping[int, RankReport]) -> str | None:
    """Say which collective holds everybody up where all of its ranks wait in it; None where they wait in a circle.

    Under NCCL a host launches collectives long before they run, so that only the oldest one of a rank says where it is.
    """
    visited = set()
    while report.rank not in visited and report.collectives:
        visited.add(report.rank)
        collective = report.collectives[0]
        elsewhere = [
            rank for rank in collective.ranks if reports[rank].collectives[:1] != (collective,)
        ]
        if not elsewhere:
            return f"{listed(collective.ranks)} wait in {collective} at {report.position}"
        report = reports[elsewhere[0]]
    return None


def _is_idle(report: RankReport) -> bool:
    """Whether a rank waits for no other rank."""
    return not report.collectives and not report.in_wait and not report.message


def _hangs(reports: list[RankReport]) -> str:
    report, more_ranks = reports[0], len(reports) - 1
    more = f" (and {more_ranks} more)" if more_ranks else ""
    return f"rank {report.rank}{more} hangs at {report.position} for {report.seconds:.0f} s, in {report.frame}"


def _waiters(reports: Mapping[int, RankReport], collective: Collective) -> str:
    ranks = tuple(rank for rank, report in reports.items() if collective in report.collectives)
    return f"{listed(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {collective}"


def _positions(reports: list[RankReport]) -> str:
    listed_reports, more = reports[:MAX_RANKS_LISTED], len(reports) - MAX_RANKS_LISTED
    positions = [
        f"rank {report.rank} at {report.position}{_in(report) or f', {report.frame}'}"
        for report in listed_reports
    ]
    return "; ".join(positions) + (f" and {more} more" if more > 0 else "")


def _in(report: RankReport) -> str:
    if report.collectives:
        return f", in {report.collectives[0]}"
    return f", waiting for the {report.message}" if report.message else ""


def listed(ranks: tuple[int, ...]) -> str:
    """Ranks in words; a long list is shortened."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MAX_RANKS_LISTED:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return f"ranks {', '.join(map(str, ranks))}"
