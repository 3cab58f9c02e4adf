"""report.json gives back what went in, wherever the run folder lies."""

import json
import math
import shutil
from dataclasses import replace

import numpy
import pytest

from tests.faults.planted_entries import dangling_link, fifo, folder
from xscale.core.errors import ConfigError
from xscale.observe import EndReport, SampleReport
from xscale.observe.record import Record, read_record, write


def test_what_is_read_is_what_was_written(tmp_path, facts):
    run = tmp_path / "run"
    odd = {"odd": numpy.arange(3 * 5 * 7).reshape(3, 5, 7) % 3 == 0}
    known = facts(folder=run)
    before = Record(
        replace(known, layouts=known.layouts | odd),
        (SampleReport(10, "def ", "\ud800\x00é"),),
        EndReport(40, "done", "", 2.41, 0.9, 40),
    )
    write(before)
    moved = tmp_path / "elsewhere"
    shutil.move(run, moved)
    after = read_record(moved)
    assert after.facts.folder == moved
    assert after.samples == before.samples
    assert after.end == before.end
    assert after.facts.config == before.facts.config
    assert after.facts.notes == before.facts.notes
    assert after.facts.layouts.keys() == before.facts.layouts.keys()
    for layer, layout in before.facts.layouts.items():
        assert after.facts.layouts[layer].dtype == bool
        assert numpy.array_equal(after.facts.layouts[layer], layout)


def test_equal_layouts_are_kept_once(tmp_path, facts):
    write(Record(facts()))
    data = json.loads((tmp_path / "report.json").read_text())
    assert len(data["facts"]["layouts"]["kinds"]) == 2
    assert not list(tmp_path.glob("*.part"))


def test_the_record_is_strict_json(tmp_path, facts):
    write(Record(facts(), end=EndReport(1, "failed", baseline_bits_per_byte=math.nan)))
    assert read_record(tmp_path).end.baseline_bits_per_byte is None


@pytest.mark.parametrize("text", [None, "{", "[]", '{"facts": {}}'])
def test_a_folder_that_holds_no_record_is_refused_by_name(tmp_path, text):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_record(tmp_path)


@pytest.mark.parametrize("kind", [dangling_link, fifo, folder], ids=lambda kind: kind.__name__)
def test_a_record_that_is_no_file_is_a_sentence(kind, tmp_path):
    kind(tmp_path / "report.json", tmp_path)
    with pytest.raises(ConfigError, match=r"not the record of a run \(this is .*, not a file\)") as refused:
        read_record(tmp_path)
    assert "Errno" not in str(refused.value)
