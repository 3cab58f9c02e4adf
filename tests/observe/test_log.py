"""log.txt tells what made the run and what happened, with the time."""

import re
from pathlib import Path

from xscale.observe import EndReport, EvalReport, SampleReport
from xscale.observe.log import Log


def test_the_log_holds_config_versions_and_events(tmp_path, facts):
    log = Log(tmp_path)
    log.message("before the start")
    log.start(facts())
    log.message("two\nlines \x1b[31m")
    log.evaluated(EvalReport(10, 2.0, 7.389, 1.25, 3.0))
    log.sampled(SampleReport(10, "def ", "f():\n    pass"))
    log.saved(10, Path("A/checkpoints/step-10"), 0.5)
    log.finish(EndReport(10, "stopped", "SIGTERM"))
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d (.*)$", text, re.M)
    assert entries[0] == "before the start"
    assert "versions: python 3.11.2, torch 2.13.0" in entries
    assert "grouped_gemm: torch (no GPU)" in entries
    assert "step 10: validation loss 2.0000, perplexity 7.389, 1.2500 bits per byte (3.0 s)" in entries
    assert "step 10: saved A/checkpoints/step-10 (0.5 s)" in entries
    assert entries[-1] == "stopped at step 10: SIGTERM"
    assert "\n    run:\n      dir: A\n" in text
    assert "two\n    lines ␛[31m" in text
    assert "\n    def f():\n        pass\n" not in text.split("sample")[0]
    assert "sample\n    def f():\n        pass\n" in text


def test_a_resumed_process_adds_below(tmp_path, facts):
    for number, resumed in enumerate((None, 20)):
        log = Log(tmp_path)
        log.start(facts(resumed_from=resumed, first_step=1 + (resumed or 0)))
        log.finish(EndReport(20 * (number + 1), "done"))
    text = (tmp_path / "log.txt").read_text()
    assert text.index("starting; steps 1 to 40") < text.index("resuming from step 20; steps 21 to 40")


def test_a_message_after_the_end_is_still_written(tmp_path, facts):
    log = Log(tmp_path)
    log.start(facts())
    log.finish(EndReport(1, "done"))
    log.message("warning: late")
    assert "warning: late" in (tmp_path / "log.txt").read_text()


def test_a_full_disk_loses_no_entry(tmp_path, facts, limited_files):
    """The start too, which writes several, loses none."""
    log = Log(tmp_path)
    with limited_files(0):
        log.start(facts())
        assert log.backlog.missing == 5
        assert "too large" in str(log.backlog.error)
    log.finish(EndReport(1, "done"))
    assert log.backlog.missing == 0
    text = (tmp_path / "log.txt").read_text()
    assert text.index("starting") < text.index("config:") < text.index("done at step 1")
