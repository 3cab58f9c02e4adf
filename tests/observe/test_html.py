"""report.html: whole, self-contained, and safe to open whatever the model wrote."""

import base64
import itertools
import json
import re
import tracemalloc
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from xscale.core.errors import ConfigError
from xscale.observe import EndReport, EvalReport, ObserveConfig, RunFacts, SampleReport
from xscale.observe.html import HtmlReport, build_report
from xscale.observe.make_observers import make_observers
from xscale.observe.metrics import Metrics
from xscale.observe.report.sections import statistic_note

VOID = {"meta", "img", "br", "input"}
HOSTILE = '<script>alert(1)</script>\x1b[2J & "quoted" \' \ud800'


class Page(HTMLParser):
    """Checks that tags close in order and collects what is there."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _watch(folder, facts, reports, reason="done", samples=(), tell=print):
    watching = [Metrics(folder), HtmlReport(folder, tell)]
    for one in watching:
        one.start(facts)
    for report in reports:
        for one in watching:
            (one.evaluated if isinstance(report, EvalReport) else one.step)(report)
    for sample in samples:
        watching[1].sampled(sample)
    end = EndReport(40, reason, "because <of> this", 2.41, 1.5, 30, ended=1.8e9 + 90, peak_memory=3 * 2**29)
    for one in watching:
        one.finish(end)


@pytest.fixture
def page(tmp_path, facts, run):
    _watch(tmp_path, facts(), run(), samples=[SampleReport(20, "old ", "text"), SampleReport(40, "def ", HOSTILE)])
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_needs_nothing_else(page):
    parsed = Page(page)
    assert parsed.links
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert not re.search(r"https?://|@import|url\(", page)
    assert "script" not in parsed.tags
    # Two layouts in three layers, one of them with two kinds of heads, and one layer of experts.
    assert parsed.tags.count("img") == 4
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', page))


def test_every_curve_has_a_sentence_that_says_what_is_good(page):
    curves = re.findall(r"<figure><figcaption>(\w[^<]*) .*?</figure>", page, re.DOTALL)
    with_sentence = re.findall(r'<figure><figcaption>(\w[^<]*) .*?</svg><p class="note">\w[^<]+\.</p></figure>', page)
    assert len(curves) > 8
    assert with_sentence == curves


def test_every_statistic_of_a_mixture_has_a_sentence():
    mixture = ["load", "load_cv", "load_p50", "load_p95", "load_max", "dropped", "entropy", "confidence", "aux", "z"]
    mixture += ["overload", "replaced"]
    others = ["importance", "load_loss", "soft_loss", "loss", "accuracy", "grad_norm", "steps", "computed"]
    assert all(statistic_note(name).endswith(".") for name in (*mixture, *others))
    assert statistic_note("mine") == ""


def test_every_part_of_the_run_is_on_it(page):
    text = " ".join(Page(page).texts)
    for words in (
        "Loss, nats a token",
        "Bits per byte",
        "order-2 byte model: 2.410",
        "Learning rate",
        "Gradient norm",
        "Tokens a second",
        "A step's time: 500 ms",
        "backward 60 %, 300 ms",
        "stack.blocks.1.ffn.part",
        "2 % of the tokens at the end",
        "stack.blocks.{0, 2}.mixer.core",
        "heads 0–1:",
        "heads 2–3:",
        "because <of> this",
        "dir: A",
        "2.13.0",
        "grouped_gemm: torch (no GPU)",
    ):
        assert words in text, words


def test_what_started_the_run_and_what_it_used_is_on_it(tmp_path, facts, run):
    for step in (20, 30, 40):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    origin = facts(
        command="xscale train <big>.yaml", host="node7", commit="abc1234", started=1.8e9, data={"epochs": "2.5"}
    )
    _watch(tmp_path, origin, run(1, 20))
    # The run began when its first process did.
    _watch(tmp_path, replace(origin, resumed_from=20, started=1.8e9 + 60), run(21, 40))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    words = " ".join(" ".join(Page(text).texts).split())
    for shown in (
        "xscale train <big>.yaml",
        "node7",
        "abc1234",
        "2027-01-15 08:00:00 UTC",
        "2027-01-15 08:01:30 UTC",
        "epochs 2.5",
        "1.50 GiB",
        "Steps: 20, 30 (best) , 40.",
        "The best validation is 1.5000 bits per byte at step 30.",
    ):
        assert shown in words, shown


def test_the_axes_are_linear_or_logarithmic_and_the_curves_say_what_is_good(page):
    assert page.count('type="radio"') == 2
    linear, logarithmic = page.split("</section>")[0].split('<div class="grid against-logarithmic">')
    for drawn in (linear.split('<div class="grid against-linear">')[1], logarithmic):
        titles = re.findall(r"<figcaption>(.*?) <|<figcaption>(.*?)</", drawn)
        assert len(titles) == drawn.count('<p class="note">') == 4
    # The same distance for each factor: tokens 4096 n at steps n.
    circles = re.findall(r'class="hover" cx="([\d.]+)" cy="[\d.]+" r="7"><title>([\d.]+)k tokens', logarithmic)
    places = {round(float(tokens) / 4.096): float(x) for x, tokens in circles}
    assert places[4] - places[2] == pytest.approx(places[8] - places[4], abs=0.3)


def test_what_the_model_wrote_is_text(page):
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;␛[2J &amp; &quot;quoted&quot;" in page
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in page
    assert page.index("step 40</summary>") < page.index("step 20</summary>")


def test_it_can_be_built_again_from_the_folder(page, tmp_path):
    (tmp_path / "report.html").unlink()
    assert build_report(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_a_run_that_was_killed_still_has_its_page(tmp_path, facts, run):
    metrics, html = Metrics(tmp_path), HtmlReport(tmp_path, print)
    for one in (metrics, html):
        one.start(facts())
    for report in run(1, 15):
        if not isinstance(report, EvalReport):
            metrics.step(report)
    text = build_report(tmp_path).read_text(encoding="utf-8")
    Page(text)
    assert "has not ended" in text
    assert "at step 15 of 40" in text


def test_a_run_of_no_steps_and_no_experts_has_a_page(tmp_path, facts):
    _watch(tmp_path, facts(layouts={}), [], reason="failed")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    Page(text)
    assert "The run failed: because &lt;of&gt; this" in text
    assert "Experts" not in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path, facts, step, value):
    reports = [step(n, loss=value, grad_norm=value, mfu=None, tokens_per_second=value) for n in (1, 2, 3)]
    statistics = {"a/load": [value, value], "a/dropped": value}
    _watch(tmp_path, facts(), [*reports, step(4, loss=1.0, statistics=statistics)])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    Page(text)
    assert not re.search(r'[ ="](nan|inf)', text)


def test_samples_after_the_resumed_step_are_not_shown_twice(tmp_path, facts, run):
    _watch(tmp_path, facts(), run(1, 27), samples=[SampleReport(n, "", f"one-{n}") for n in (10, 20, 25)])
    _watch(tmp_path, facts(resumed_from=20, first_step=21), run(21, 40), samples=[SampleReport(25, "", "two-25")])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [word for word in ("one-10", "one-20", "one-25", "two-25") if word in text] == ["one-10", "one-20", "two-25"]
    assert "resumed from step 20" in text


def test_a_record_that_cannot_be_read_loses_old_samples_and_not_the_run(tmp_path, facts, run):
    (tmp_path / "report.json").write_text("{torn")
    told = []
    _watch(tmp_path, facts(resumed_from=20, first_step=21), run(21, 40), tell=told.append)
    assert len(told) == 1
    assert "report.json: the file is not the record of a run" in told[0]
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        build_report(tmp_path)


def test_all_observers_together_fill_the_run_folder(tmp_path, facts, run, capsys):
    folder = tmp_path / "A"
    observers = make_observers(ObserveConfig(), folder)
    known: RunFacts = facts(folder=folder)
    observers.start(known)
    for report in run():
        (observers.evaluated if isinstance(report, EvalReport) else observers.step)(report)
    observers.finish(EndReport(40, "done"))
    names = {path.name for path in folder.iterdir()}
    assert names == {"metrics.jsonl", "log.txt", "report.html", "report.json", "tensorboard"}
    assert "step 40/40" in capsys.readouterr().out


def test_observers_can_be_left_out(tmp_path, facts, step):
    folder = tmp_path / "A"
    config = ObserveConfig(tensorboard=False, report=False, progress=False)
    observers = make_observers(config, folder)
    observers.start(facts(folder=folder))
    observers.step(step(1))
    observers.finish(EndReport(1, "done"))
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "log.txt"}


def hostile_values():
    """Values that no run writes, in place of a number."""
    return ["<script>alert(1)</script>", ["<script>"], {"<script>": 1}, True, 10**400, -1, None, [[1]], [], [1, 2]]


@pytest.mark.parametrize("value", hostile_values())
@pytest.mark.sampled(3)
def test_a_value_of_the_metrics_that_is_no_number_is_not_on_the_page(tmp_path, facts, run, value):
    """Bad values in every key of a step and of an evaluation, of one line or of all by turns, and as a key itself."""
    _watch(tmp_path, facts(), run())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    keys = sorted({key for line in lines for key in line})
    keys += ["split/<script>", "<script>/load", "<script>", "blocks.0/<script>"]
    changes = itertools.islice(itertools.cycle((lines[:1], lines[-2:], lines)), len(repr(value)) % 3, None)
    for key, changed in zip(keys, changes, strict=False):
        text = "".join(
            json.dumps({**line, key: value} if line in changed else line).replace("NaN", "null") + "\n"
            for line in lines
        )
        (tmp_path / "metrics.jsonl").write_text(text)
        written = build_report(tmp_path).read_text(encoding="utf-8")
        assert "script" not in Page(written).tags, key


@pytest.mark.parametrize("value", hostile_values())
def test_a_value_of_the_record_of_another_type_is_refused_or_escaped(tmp_path, facts, run, value):
    _watch(tmp_path, facts(), run(), samples=[SampleReport(20, "old ", "text")])
    whole = json.loads((tmp_path / "report.json").read_text())
    for section in ("facts", "end", "samples"):
        for key in [*(whole[section][0] if section == "samples" else whole[section]), "other"]:
            data = json.loads(json.dumps(whole))
            (data[section][0] if section == "samples" else data[section])[key] = value
            (tmp_path / "report.json").write_text(json.dumps(data))
            try:
                written = build_report(tmp_path).read_text(encoding="utf-8")
            except ConfigError:
                continue
            assert "script" not in Page(written).tags, key


def test_layouts_that_decompress_to_gigabytes_are_not_decompressed(tmp_path, facts, run):
    """A few kilobytes of a record stood for as much memory as a machine has."""
    _watch(tmp_path, facts(), run())
    data = json.loads((tmp_path / "report.json").read_text())
    bits = base64.b64encode(zlib.compress(bytes(1 << 27))).decode()
    for kind in data["facts"]["layouts"]["kinds"].values():
        kind["bits"] = bits
    (tmp_path / "report.json").write_text(json.dumps(data))
    tracemalloc.start()
    build_report(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
