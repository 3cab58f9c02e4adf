"""report.html: the run on one self-contained page, for screens, phones and paper."""

from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.run_files import kind_of
from xscale.observe import record
from xscale.observe.backlog import Backlog
from xscale.observe.events import EndReport, RunFacts, SampleReport, StepReport
from xscale.observe.format import page_bytes, printable
from xscale.observe.observer import Observer
from xscale.observe.record import Record
from xscale.observe.report import evaluation_sections, sections
from xscale.observe.report.style import STYLE

REPORT_FILE = "report.html"


class HtmlReport(Observer):
    """Keeps report.json in `folder` while the run runs and builds report.html from it and metrics.jsonl at the end.

    A run that is killed has its report.json; `build_report` makes the page from it.
    """

    def __init__(self, folder: Path, message: Callable[[str], None]) -> None:
        """`message` gets warnings about the page."""
        self._folder = folder
        self._message = message
        self._record: Record | None = None
        # A write holds the whole record, so one entry stands for all that came while the disk was full.
        self.backlog: Backlog[None] = Backlog(record.RECORD_NAME, lambda _: self._write())

    def start(self, facts: RunFacts) -> None:
        samples: tuple[SampleReport, ...] = ()
        resumed = () if facts.resumed_from is None else (facts.resumed_from,)
        started = facts.started
        if (
            facts.resumed_from is not None
            and kind_of(self._folder / record.RECORD_NAME) is not None
        ):
            try:
                before = record.read_record(self._folder)
                # A process that begins after the last step writes the samples of it again.
                last = facts.resumed_from - (facts.resumed_from == facts.last_step)
                samples = tuple(sample for sample in before.samples if sample.step <= last)
                resumed = (
                    *(step for step in before.resumed_from if step < facts.resumed_from),
                    *resumed,
                )
                started = before.facts.started or started
            except ConfigError as error:
                # Old samples are not worth failing the run.
                self._message(f"warning: earlier samples will not be in {REPORT_FILE}: {error}")
        self._record = Record(
            replace(facts, folder=self._folder, started=started), samples, resumed_from=resumed
        )
        self._save()

    def step(self, report: StepReport) -> None:
        self.backlog.retry()

    def sampled(self, report: SampleReport) -> None:
        assert self._record is not None
        self._record = replace(self._record, samples=(*self._record.samples, report))
        self._save()

    def finish(self, report: EndReport) -> None:
        if self._record is None:
            return
        self._record = replace(self._record, end=report)
        self._save()
        self.backlog.flush()
        if self.backlog.missing:
            return
        try:
            build_report(self._folder)
        except ConfigError as error:
            # The run is over, and what it trained is not the page's.
            raise OSError(f"no {REPORT_FILE}: {error}") from error

    def _save(self) -> None:
        if self.backlog.missing:
            self.backlog.retry()
        else:
            self.backlog.add(None, 0)

    def _write(self) -> None:
        assert self._record is not None
        record.write(self._record)


def build_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of the run in `folder` from the files there to `path`, else its report.html; returns that.

    Errors: ConfigError where `folder` contains no record of a run; OSError.
    """
    path = path or folder / REPORT_FILE
    content = page(record.read_record(folder), record.load_history(folder))
    write_atomically(path, page_bytes(content))
    return path


def page(run: Record, numbers: record.History) -> str:
    """The whole document."""
    title = escape(printable(run.facts.folder.resolve().name))
    curves = sections.curves(run, numbers)
    parts = [
        sections.summary(run, numbers),
        sections.section("Learning", curves, evaluation_sections.evaluations(numbers)),
        sections.section("Tasks", evaluation_sections.tasks(numbers)),
        sections.section("Samples", evaluation_sections.samples(run)),
        sections.section("Experts: who gets the tokens", sections.experts(numbers)),
        sections.section("Attention: which blocks see which", sections.attention(run)),
        sections.section("Speed", sections.speed(numbers)),
        sections.section("Inside the model", sections.statistics(numbers)),
        sections.section("Checkpoints", sections.checkpoints(run)),
        sections.section("What made it", sections.setting(run)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )
