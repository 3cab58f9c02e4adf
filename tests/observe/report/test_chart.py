"""The line chart: round ticks, nothing lost that matters, nothing drawn that is not a number."""

import math
import re

import pytest

from xscale.observe.report.chart import POINTS, Curve, Level, chart, number, smooth, thin


def _ticks(svg, anchor):
    return re.findall(rf'text-anchor="{anchor}">([^<]*)<', svg)


def test_ticks_are_round_and_inside():
    svg = chart([Curve([0, 1e6, 2e6], [1.0, 3.7, 8.2])], "Loss")
    assert _ticks(svg, "end")[:4] == ["2", "4", "6", "8"]
    assert _ticks(svg, "middle") == ["0", "500k", "1M", "1.5M", "2M"]


def test_a_logarithmic_axis_has_its_own_ticks():
    assert _ticks(chart([Curve([1, 2], [0.3, 9.0])], "a", log=True), "end")[:5] == ["0.5", "1", "2", "5", "10"]
    assert _ticks(chart([Curve([1, 2], [1e-3, 1e3])], "a", log=True), "end")[:4] == ["0.01", "1", "100"]
    # Within a decade 1, 2 and 5 are too few.
    losses = _ticks(chart([Curve([1, 2], [1.91, 2.8])], "a", log=True), "end")
    assert losses[:5] == ["2", "2.2", "2.4", "2.6", "2.8"]


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [-1e-30, 1e30], [5e-324, 1e-320]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_make_a_drawing_within_the_paper(values, log):
    svg = chart([Curve(range(len(values)), values)], "a", log=log)
    places = [
        float(place)
        for place in re.findall(r'[ML ]([-\d.]+)(?=[ "LM])', "".join(re.findall(r'curve one" d=("[^"]*")', svg)))
    ]
    assert all(-1 <= place <= 600 for place in places)
    assert "nan" not in svg


def test_nothing_to_draw_is_no_figure():
    assert chart([Curve([], [])], "a") == ""
    assert chart([Curve([1], [math.nan])], "a", [Level(1.0, "b")]) == ""
    assert chart([Curve([1], [-1.0])], "a", log=True) == ""


def test_a_gap_breaks_the_line():
    svg = chart([Curve([1, 2, 3, 4, 5], [1, 2, math.nan, 4, 5])], "a")
    (path,) = re.findall(r'curve one" d="([^"]*)"', svg)
    assert path.count("M") == 2


def test_a_mark_is_on_the_paper_even_far_from_the_line():
    svg = chart([Curve([1, 2], [1.0, 1.1])], "a", [Level(3.0, "a <b> model")])
    assert "a &lt;b&gt; model" in svg
    (place,) = re.findall(r'class="mark" d="M60 ([\d.]+)H', svg)
    assert 14 <= float(place) <= 40


def test_thinning_keeps_peaks_and_ends_of_the_range():
    y = [1.0] * 100_000
    y[54_321] = 9.0
    y[12_345] = -9.0
    kept = thin(range(100_000), y)
    assert len(kept) <= POINTS + 2
    assert (54_321, 9.0) in kept
    assert (12_345, -9.0) in kept
    assert kept == sorted(kept)
    assert thin([1, 2], [3, 4]) == [(1, 3), (2, 4)]


def test_smoothing_is_centred():
    line = [float(value) for value in range(101)]
    assert smooth(line, 20)[10:90] == pytest.approx(line[10:90])
    assert smooth([1.0, math.nan, 3.0], 3)[1] == pytest.approx(2.0)
    assert math.isnan(smooth([math.nan], 3)[0])
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.5e6, "1.5M"), (100_000, "100k"), (2e-4, "2e-4"), (2.5e-5, "2.5e-5"), (0.001, "0.001"), (30, "30")],
)
def test_number(value, text):
    assert number(value) == text
