"""An observer that cannot write keeps what it has, or is dismissed, with a warning that nobody can miss."""

import io
import math

import pytest

from xscale.observe import EndReport, EvalReport, Observer, ObserverGroup, SampleReport
from xscale.observe import backlog as backlogs
from xscale.observe.backlog import Backlog
from xscale.observe.progress import Progress


class Diary(Observer):
    def __init__(self):
        self.heard = []

    def start(self, facts):
        self.heard.append("start")

    def step(self, report):
        self.heard.append(("step", report.step))

    def evaluated(self, report):
        self.heard.append(("evaluated", report.step))

    def sampled(self, report):
        self.heard.append(("sampled", report.text))

    def message(self, text):
        self.heard.append(text)

    def saved(self, step, path, seconds):
        self.heard.append(("saved", step))

    def finish(self, report):
        self.heard.append(report.reason)


class Broken(Diary):
    def __init__(self, error=None):
        super().__init__()
        self.error = error or OSError(28, "No space left on device")

    def step(self, report):
        super().step(report)
        if report.step == 2:
            raise self.error


END = EndReport(3, "done")


def _run(audience, facts, step):
    audience.start(facts())
    for number in (1, 2, 3):
        audience.step(step(number))
    audience.finish(END)


def test_everybody_hears_everything_in_order(facts, step, tmp_path):
    diary = Diary()
    audience = ObserverGroup([diary, Observer()])
    audience.start(facts())
    audience.step(step(1))
    audience.evaluated(EvalReport(1, 1.0, 2.7, None, 0.1))
    audience.sampled(SampleReport(1, "a", "b"))
    audience.saved(1, tmp_path, 0.1)
    audience.message("hello")
    audience.finish(END)
    assert diary.heard == ["start", ("step", 1), ("evaluated", 1), ("sampled", "b"), ("saved", 1), "hello", "done"]


@pytest.mark.parametrize("broken_first", [True, False])
def test_a_full_disk_ends_the_observer_and_is_said_now_and_at_the_end(facts, step, broken_first):
    broken, diary, shouted = Broken(), Diary(), io.StringIO()
    audience = ObserverGroup([broken, diary] if broken_first else [diary, broken], shouted)
    _run(audience, facts, step)
    warning = "warning: broken has stopped (No space left on device); the run continues without it"
    assert broken.heard == ["start", ("step", 1), ("step", 2)]
    assert [item for item in diary.heard if item != warning] == [
        "start",
        *[("step", number) for number in (1, 2, 3)],
        "done",
    ]
    assert diary.heard.count(warning) == 2
    assert diary.heard[-2:] == [warning, "done"]
    # Nobody here speaks to the person, so standard error does.
    assert shouted.getvalue().splitlines() == [warning, warning]


def test_standard_error_stays_clean_while_progress_can_speak(facts, step):
    screen, shouted = io.StringIO(), io.StringIO()
    _run(ObserverGroup([Progress(stream=screen), Broken()], shouted), facts, step)
    assert screen.getvalue().count("warning: broken has stopped") == 2
    assert shouted.getvalue() == ""


def test_a_closed_terminal_does_not_end_the_run(facts, step):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    diary, shouted = Diary(), io.StringIO()
    _run(ObserverGroup([Progress(stream=Closed()), diary], shouted), facts, step)
    assert ("step", 3) in diary.heard
    assert "progress has stopped" in shouted.getvalue()


def test_two_that_break_at_once_are_each_dismissed_once(facts, step):
    shouted = io.StringIO()
    audience = ObserverGroup([Broken(), Broken(), Broken()], shouted)
    _run(audience, facts, step)
    assert len(audience.warnings) == 3


def test_one_that_breaks_at_the_very_end_is_heard_of(facts, step):
    class Late(Diary):
        def finish(self, report):
            raise OSError("too late")

    shouted = io.StringIO()
    _run(ObserverGroup([Progress(stream=io.StringIO()), Late()], shouted), facts, step)
    assert "late has stopped (too late)" in shouted.getvalue()


def test_a_fault_of_ours_is_not_swallowed(facts, step):
    with pytest.raises(ZeroDivisionError):
        _run(ObserverGroup([Broken(ZeroDivisionError())]), facts, step)


class Writer(Diary):
    """Writes steps through a backlog; the calls of its disk that are in `refused` fail."""

    def __init__(self, refused=()):
        super().__init__()
        self.refused, self.calls, self.written = set(refused), 0, []
        self.backlog = Backlog("rows", self.write)

    def write(self, entry):
        self.calls += 1
        if self.calls in self.refused:
            raise OSError(28, "No space left on device")
        self.written.append(entry)

    def step(self, report):
        self.backlog.add(report.step, 100)

    def finish(self, report):
        self.backlog.flush()


FULL = "(No space left on device)"
BEGINS = f"warning: rows cannot be written {FULL}; what is new is kept in memory, and tried again"


@pytest.mark.parametrize(
    ("refused", "written", "messages"),
    [
        pytest.param((), 12, [], id="nothing is refused"),
        pytest.param((4,), 12, [BEGINS, "rows is written again, and nothing is missing"], id="one second"),
        pytest.param((4, 5, 6), 12, [BEGINS, "rows is written again, and nothing is missing"], id="an episode"),
        pytest.param(
            (2, 8), 12, [BEGINS, "rows is written again, and nothing is missing"] * 2, id="two episodes, two warnings"
        ),
        pytest.param(range(5, 99), 4, [BEGINS], id="to the end"),
    ],
)
def test_what_a_full_disk_refuses_is_written_later(facts, step, refused, written, messages):
    writer, diary, shouted = Writer(refused), Diary(), io.StringIO()
    audience = ObserverGroup([diary, writer], shouted)
    audience.start(facts())
    for number in range(1, 13):
        audience.step(step(number))
    audience.finish(END)
    assert writer.written == list(range(1, written + 1)), "in order, and each once"
    said = [item for item in diary.heard if isinstance(item, str) and "rows" in item]
    lost = f"warning: {12 - written} entries of rows could not be written {FULL}"
    assert said == messages + ([lost] if written < 12 else [])
    assert audience.unwritten() == ("" if written == 12 else f"{12 - written} entries of rows")
    assert (lost in shouted.getvalue()) == (written < 12)


def test_what_is_missing_is_said_where_the_end_fails_too(facts, step):
    """A broken disk refuses what is kept, and then the flush of the file that is closed."""

    class Closing(Writer):
        def finish(self, report):
            super().finish(report)
            raise OSError(5, "Input/output error")

    diary = Diary()
    audience = ObserverGroup([diary, Closing(range(2, 99))], io.StringIO())
    _run(audience, facts, step)
    assert diary.heard[-1] == f"warning: 2 entries of rows could not be written {FULL}"
    assert audience.unwritten() == "2 entries of rows"
    audience = ObserverGroup([diary, Closing()], io.StringIO())
    _run(audience, facts, step)
    assert audience.unwritten() == "the end of rows"


def test_what_is_kept_is_bounded_and_the_rest_counted(facts, step, monkeypatch):
    monkeypatch.setattr(backlogs, "LIMIT_BYTES", 1000)
    writer, diary = Writer(range(1, 9)), Diary()
    audience = ObserverGroup([diary, writer], io.StringIO())
    audience.start(facts())
    for number in range(1, 600):
        audience.step(step(number))
    assert writer.written[:10] == list(range(1, 11)), "the oldest are kept"
    assert writer.backlog.dropped == 599 - len(writer.written) > 0
    assert f"rows is written again; {writer.backlog.dropped} entries of rows could not be kept" in diary.heard
    assert audience.unwritten() == f"{writer.backlog.dropped} entries of rows"


def test_attempts_become_rarer(facts, step):
    """One that takes a minute, of a server that does not answer, must not be made at each of 100,000 steps."""
    writer = Writer(range(1, 1000))
    writer.backlog = Backlog("rows", writer.write, longest_pause=1 << 30)
    for number in range(10_000):
        writer.step(step(number))
    assert writer.calls <= 2 * math.log2(10_000)
