"""Contiguous streams: each row reads consecutive segments, and none is lost or read twice before all are read."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.test_packed import split
from xscale.core.errors import ConfigError
from xscale.data.samples.loader import Loader
from xscale.data.samples.packed import PackedDataset
from xscale.data.samples.streams import StreamDataset


def streams(folder: Path, segments: int, count: int, length: int = 5) -> StreamDataset:
    """`count` streams of a text of so many segments, whose tokens count up."""
    part = split(folder, [segments * length + 1])
    return StreamDataset(PackedDataset(part, length, shuffle=False), count)


@pytest.mark.parametrize(("segments", "count"), [(12, 3), (12, 5), (7, 7), (11, 4), (9, 1)])
def test_a_row_reads_consecutive_segments_and_each_segment_is_read_in_turn(
    tmp_path: Path, segments: int, count: int
) -> None:
    data = streams(tmp_path, segments, count)
    steps = 3 * segments
    positions = data.positions(np.arange(steps * count)).reshape(steps, count)
    assert ((positions[1:] - positions[:-1]) % segments == 1).all(), "a row leaves out a segment or repeats one"
    read = [np.bincount(positions[:step].ravel(), minlength=segments) for step in range(1, steps + 1)]
    assert all(counts.max() - counts.min() <= 1 for counts in read), "a segment is read again before another is read"
    assert read[segments - 1].tolist() == [count] * segments


def test_a_segment_begins_where_it_follows_none_of_its_row(tmp_path: Path) -> None:
    data = streams(tmp_path, 8, 2)
    begins = data.begins(np.arange(2 * 8)).reshape(8, 2)
    # The second row reads segments 4 to 7, and begins anew at the first of the text.
    assert begins.nonzero()[0].tolist() == [0, 0, 4]
    assert begins.nonzero()[1].tolist() == [0, 1, 1]
    loaded = Loader(data).samples(8, 2)
    assert loaded.begins is not None
    assert loaded.begins.tolist() == [False, True]
    assert loaded.tokens[0].tolist() == list(range(20, 26))


def test_streams_shorter_than_a_segment_are_refused(tmp_path: Path) -> None:
    what = r"data\.order: the train split has 3 segments of 5 tokens, .* each of the 4 rows"
    with pytest.raises(ConfigError, match=what):
        streams(tmp_path, 3, 4)


def test_random_choices_of_a_segment_repeat_with_a_dupe_factor(tmp_path: Path) -> None:
    data = streams(tmp_path, 6, 4)
    assert [data.draw_number(index) for index in range(30)] == list(range(30))
    data.packed.dupe_factor = 2
    positions = data.positions(np.arange(6 * 4 * 4))
    drawn = [data.draw_number(index) for index in range(6 * 4 * 4)]
    versions = {
        place: {number for at, number in zip(positions, drawn, strict=True) if at == place} for place in range(6)
    }
    assert versions == {place: {place, place + 6} for place in range(6)}
