"""The page on several runs: which it finds, how it groups them, what it draws and ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_html import Page
from xscale.core.errors import ConfigError
from xscale.observe import EndReport, EvalReport
from xscale.observe.compare_runs import ComparedRun, average, build_comparison, differing_keys, find_runs, group_runs
from xscale.observe.html import HtmlReport
from xscale.observe.metrics import Metrics
from xscale.observe.record import load_history, read_record

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, facts: Any, step: Any) -> Write:
    """Writes the files of a run of 40 steps whose losses are `offset` above those of the fixture."""

    def make(name: str, offset: float, seed: int, *, bits: bool = True, restarted: bool = False, **model: Any) -> Path:
        folder: Path = tmp_path / name
        folder.mkdir(parents=True)
        config = {"run": {"dir": name, "seed": seed}, "model": model, "train": {"steps": 40}}
        observers = [Metrics(folder), HtmlReport(folder, print)]
        for one in observers:
            one.start(facts(folder=folder, config=config))
        for number in range(1, 41):
            seconds = 0.5 * (number - 20 if restarted and number > 20 else number)
            report = step(number, loss=offset + 6 * math.exp(-number / 10), seconds=seconds)
            for one in observers:
                one.step(report)
                if number % 10 == 0:
                    loss = offset + number / 1000 if number == 40 else offset + 1 / number
                    one.evaluated(EvalReport(number, loss, math.exp(loss), loss / 2 if bits else None, 1.0))
        for one in observers:
            one.finish(EndReport(40, "done"))
        return folder

    return make


def loaded(folder: Path) -> ComparedRun:
    return ComparedRun(folder, read_record(folder), load_history(folder))


def test_seeds_are_one_curve_with_a_band_and_configs_have_their_own(tmp_path: Path, write: Write) -> None:
    write("sweep/a1", 2.0, 1, core="softmax", heads=4)
    write("sweep/a2", 2.4, 2, core="softmax", heads=4)
    write("sweep/b1", 1.5, 1, core="linear<i>", heads=4)
    runs = [loaded(folder) for folder in find_runs([str(tmp_path / "sweep")])]
    assert differing_keys(runs) == ["model.core"]
    groups = group_runs(runs, ["model.core"])
    assert [(group.label, len(group.runs)) for group in groups] == [("core=softmax", 2), ("core=linear<i>", 1)]
    text = build_comparison([run.folder for run in runs], tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = Page(text)
    words = " ".join(parsed.texts)
    assert "core=softmax (2 seeds)" in words
    assert "model.heads" not in words, "it is the same in all of them"
    assert "<i>" not in text.replace("linear&lt;i&gt;", "")
    assert "script" not in parsed.tags
    assert not parsed.links
    assert text.count("<svg") == text.count('<p class="note">') == 4 * 3, "a sentence for each curve"
    # Four charts against each of tokens, steps and time have a band: one group has two seeds.
    assert text.count('class="band') == 4 * 3
    assert text.index("sweep/b1") < text.index("sweep/a1") < text.index("sweep/a2"), "the best first"


def test_the_best_step_is_the_lowest_evaluation(write: Write) -> None:
    run = loaded(write("one", 2.0, 1))
    assert run.best("eval_loss") == (pytest.approx(2 + 1 / 30), 30)
    assert run.best("accuracy") is None


def test_time_goes_on_over_a_restart(write: Write) -> None:
    whole, restarted = loaded(write("whole", 2.0, 1)), loaded(write("restarted", 2.0, 1, restarted=True))
    assert restarted.seconds == pytest.approx(whole.seconds)
    assert restarted.evaluated("eval_loss", "time")[0] == pytest.approx([5, 10, 15, 20])


LIVES: dict[str, tuple[tuple[tuple[int, list[float]], ...], list[float]]] = {
    # The first step of each process and the seconds that it logs, and the seconds of the run.
    "a quick restart": (((1, [1, 2, 3, 4]), (5, [1, 2, 3, 4])), [1, 2, 3, 4, 5, 6, 7, 8]),
    "a restart that is slow to its first step": (((1, [1, 2]), (3, [30, 31])), [1, 2, 32, 33]),
    "a long evaluation, and no restart": (((1, [1, 2, 30, 31]),), [1, 2, 30, 31]),
    "both": (((1, [1, 30]), (3, [40, 70]), (5, [80])), [1, 30, 70, 100, 180]),
    "three processes, the last one slow": (((1, [1, 2, 3]), (4, [2]), (5, [9, 10])), [1, 2, 3, 5, 14, 15]),
    "a process for each step": (((1, [3]), (2, [3]), (3, [3])), [3, 6, 9]),
    "restarts that take as long as the steps before": (((1, [1, 2]), (3, [2]), (4, [2])), [1, 2, 4, 6]),
    "no logged step before a restart": (((1, []), (1, [1, 2])), [1, 2]),
    "the first process resumed": (((11, [5, 6]), (13, [8])), [5, 6, 14]),
}


@pytest.mark.parametrize("name", LIVES)
def test_time_is_summed_over_the_processes_of_a_run(tmp_path: Path, facts: Any, step: Any, name: str) -> None:
    """The second and the third case log the same seconds: what was restarted is in the record of the run alone."""
    lives, wanted = LIVES[name]
    for first, seconds in lives:
        observers = [Metrics(tmp_path), HtmlReport(tmp_path, print)]
        for observer in observers:
            observer.start(facts(folder=tmp_path, resumed_from=None if first == 1 else first - 1))
            for number, since_start in enumerate(seconds, start=first):
                observer.step(step(number, seconds=float(since_start)))
            observer.finish(EndReport(first + len(seconds) - 1, "done"))
    assert loaded(tmp_path).seconds == pytest.approx(wanted)


def test_curves_are_averaged_where_all_of_them_are() -> None:
    places, low, mean, high = average([([0, 10], [0, 10]), ([0, 5, 20], [2, 12, 27])])
    assert places == [0, 5, 10]
    assert (low, mean, high) == ([0, 5, 10], [1, 8.5, 13.5], [2, 12, 17])


def test_runs_are_named_by_folder_tree_or_pattern_once_each(tmp_path: Path, write: Write) -> None:
    a, b = write("tree/x/a", 2.0, 1), write("tree/b", 2.0, 1)
    assert find_runs([str(tmp_path / "tree" / "*"), str(a)]) == [b, a]
    assert find_runs([str(a)]) == [a]
    (tmp_path / "empty").mkdir()
    for place, what in ((tmp_path / "empty", "contains no run"), (tmp_path / "nowhere*", "there is no such folder")):
        with pytest.raises(ConfigError, match=what):
            find_runs([str(a), str(place)])


def test_configs_that_share_last_words_are_told_apart(tmp_path: Path, write: Write) -> None:
    runs = [loaded(write(f"r{n}", 2.0, 1, enc={"depth": n}, dec={"depth": 2 * n})) for n in (1, 2)]
    assert [group.label for group in group_runs(runs, differing_keys(runs))] == [
        "enc.depth=1, dec.depth=2",
        "enc.depth=2, dec.depth=4",
    ]


def test_without_bits_per_byte_the_loss_ranks(tmp_path: Path, write: Write) -> None:
    folders = [write("a", 2.0, 1, bits=False, x=1), write("b", 1.0, 1, x=2)]
    text = build_comparison(folders, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "best validation loss" in text
    assert text.index(str(folders[1])) < text.index(str(folders[0]))
