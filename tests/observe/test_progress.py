"""Lines where there is no terminal, a bar where there is one."""

import io
import re

from xscale.observe import EndReport, EvalReport, SampleReport
from xscale.observe.format import overload_lines
from xscale.observe.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _watch(stream, facts, run, **options):
    progress = Progress(stream=stream, **options)
    progress.start(facts())
    for report in run():
        (progress.evaluated if isinstance(report, EvalReport) else progress.step)(report)
    progress.finish(EndReport(40, "done", baseline_bits_per_byte=2.41))
    return stream.getvalue()


def test_plain_lines_say_loss_speed_utilisation_and_time_left(facts, run):
    text = _watch(io.StringIO(), facts, run)
    assert "\x1b" not in text
    steps = re.findall(r"^step +(\d+)/40  .*$", text, re.M)
    assert steps == ["1", "10", "20", "30", "40"]
    assert "step 20/40  loss 2.8120  8.19k tokens/s  MFU 31.2 %  10 s left" in text
    assert "step 20: validation loss 2.7767" in text


def test_both_measures_stand_at_the_end(facts, run):
    last = _watch(io.StringIO(), facts, run).splitlines()[-1]
    assert re.fullmatch(r"validation: 1\.\d{4} bits per byte; an order-2 byte model of the same text: 2\.4100", last)


def test_a_terminal_gets_a_bar(facts, run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = _watch(Terminal(), facts, run)
    assert "━" in text
    assert "40/40" in text
    assert "tokens/s" in text
    assert not re.search(r"^step +10/40  loss", text, re.M)
    assert "step 20: validation loss" in text


def test_without_steps_messages_and_evaluations_still_show(facts, run):
    for stream in (io.StringIO(), Terminal()):
        text = _watch(stream, facts, run, steps=False)
        assert "loss 2.8120" not in text
        assert "step 20: validation loss" in text


def test_time_left_counts_the_pauses(facts, step):
    stream = io.StringIO()
    progress = Progress(stream=stream, every=1)
    progress.start(facts())
    progress.step(step(1, seconds=10.0))
    # Ten seconds of evaluation lie between steps of half a second.
    progress.step(step(2, seconds=20.5))
    assert "6:39 left" in stream.getvalue()


def test_a_resumed_run_says_so(facts, step):
    stream = io.StringIO()
    Progress(stream=stream).start(facts(resumed_from=20, first_step=21))
    assert "resumed from step 20" in stream.getvalue()


def test_what_the_model_wrote_cannot_steer_the_terminal(facts):
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream=stream)
        progress.start(facts())
        before = stream.getvalue()
        progress.sampled(SampleReport(1, "def ", "f[red]x[/red]:\n\x1b[2J\x07pass"))
        progress.message("[bold]loud[/bold]")
        progress.finish(EndReport(1, "done"))
        after = stream.getvalue()[len(before) :]
        assert "def f[red]x[/red]:" in after
        assert "\x1b[2J" not in after
        assert "\x07" not in after
        assert "[bold]loud[/bold]" in after


def test_an_old_locale_is_no_reason_to_stop(facts):
    raw = io.BytesIO()
    progress = Progress(stream=io.TextIOWrapper(raw, encoding="ascii"))
    progress.start(facts())
    progress.sampled(SampleReport(1, "", "é\ud800"))
    assert b"| ??" in raw.getvalue()


def test_a_slow_run_is_silent_for_half_a_minute_at_most(facts, step, monkeypatch):
    """Steps of 12 s: of ten, those that follow 30 s of silence print a line too."""
    now = [0.0]
    monkeypatch.setattr("xscale.observe.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.start(facts())
    for number in range(1, 11):
        now[0] += 12.0
        progress.step(step(number))
    assert re.findall(r"^step +(\d+)/40", stream.getvalue(), re.M) == ["1", "4", "7", "10"]


def test_the_trained_parameters_are_said_where_they_are_fewer(facts):
    for trained, said in ((None, "active), "), (20_500, "active, 20.5k trained), ")):
        stream = io.StringIO()
        Progress(stream=stream).start(facts(trained_parameters=trained))
        assert said in stream.getvalue()


MIXTURE = {"overload": 1.618, "load_p50": 0.9, "load_p95": 2.1, "load_max": 2.4}


def statistics_of(factors):
    """The statistics of layers with these overload factors."""
    return {
        f"{layer}/{name}": value
        for layer, factor in factors.items()
        for name, value in (MIXTURE | {"overload": factor}).items()
    }


def test_the_busiest_rank_is_on_each_line_and_each_layer_at_the_end(facts, step):
    stream = io.StringIO()
    progress = Progress(stream=stream, every=1)
    progress.start(facts())
    progress.step(step(1, statistics=statistics_of({"a": 1.25, "b": 1.618})))
    progress.step(step(2, statistics={}))
    progress.finish(EndReport(2, "done"))
    *_, first, second, end, busiest, other = stream.getvalue().splitlines()
    assert "  busiest rank 1.62x  " in first
    assert "  busiest rank 1.62x  " in second, "a step that is not logged has that of the last one that is"
    assert end == "done at step 2"
    assert busiest == "b: rows of the busiest rank 1.62x of the mean, of the experts p50 0.90, p95 2.10, max 2.40"
    assert other.startswith("a: rows of the busiest rank 1.25x")


def test_without_expert_parallelism_no_line_has_a_busiest_rank(facts, step):
    stream = io.StringIO()
    progress = Progress(stream=stream, every=1)
    progress.start(facts())
    progress.step(step(1, statistics={"a/load": [0.5, 0.5], "a/load_p50": 1.0, "b/overload": float("nan")}))
    progress.finish(EndReport(1, "done"))
    assert "busiest" not in stream.getvalue()


def test_of_many_layers_the_most_overloaded_are_listed():
    lines = overload_lines(statistics_of({f"blocks.{layer}": 1 + layer / 10 for layer in range(10)}))
    assert [line.split(":")[0] for line in lines[:-1]] == [f"blocks.{layer}" for layer in range(9, 1, -1)]
    assert lines[-1] == "2 more layers, with less, are in metrics.jsonl"
