"""The table of quality against blocks: its recipes are accepted, and points become rows of the page."""

from pathlib import Path

import pytest

from xscale.bench.early_exit import (
    FIRST,
    LAST,
    PAGE,
    ROWS,
    TAGS,
    points_of,
    recipe_of,
    spaced,
    table,
    tagged_lines,
    write,
)


@pytest.mark.parametrize("row", ROWS, ids=[row.recipe for row in ROWS])
def test_rows_of_exits_halting_and_gates_are_accepted_on_labels_and_pairs(row: object, tmp_path: Path) -> None:
    recipe = recipe_of(row, tmp_path, 10)  # type: ignore[arg-type]
    assert recipe.objective.kind in ("classify", "tag", "seq2seq")
    assert [str(problem) for problem in recipe.check(1)] == []


def test_words_of_python_have_tags() -> None:
    ((words, tags),) = tagged_lines("x = 1\nreturn_ = f(a) if a else 'two words'  # why\n")
    assert words == ["return_", "=", "f", "(", "a", ")", "if", "a", "else", "'two_words'", "#_why"]
    assert tags[0] == "name"
    assert tags[6] == "keyword"
    assert tags[-2:] == ["string", "comment"]
    assert set(tags) <= set(TAGS)


def test_points_are_spaced_and_written_between_the_marks(tmp_path: Path) -> None:
    points = [{"setting": at / 10, "blocks": at / 10, "accuracy": 0.5} for at in range(1, 10)]
    chosen = spaced([*points, {"setting": None, "blocks": 1.0, "accuracy": 0.75}])
    assert [point["setting"] for point in chosen] == [0.1, 0.3, 0.5, 0.7, None]
    text = table({ROWS[0]: chosen})
    assert text.splitlines()[-1] == "|  |  | none | 100% | 75.0% |"
    page = tmp_path / "page.md"
    old = ["| head |", "|---|", f"| `{ROWS[0].recipe}` | old |", f"| `{ROWS[1].recipe}` | kept |", "|  | too |"]
    page.write_text("\n".join(["before", FIRST, *old, LAST, "after", ""]))
    write(text, page)
    assert page.read_text() == "\n".join(["before", FIRST, text, *old[3:], LAST, "after", ""])


def test_the_page_has_a_row_for_each_recipe() -> None:
    shown = PAGE.read_text(encoding="utf-8").split(FIRST)[1].split(LAST)[0]
    assert [row.recipe for row in ROWS if f"`{row.recipe}`" not in shown] == []


@pytest.mark.long
def test_a_row_is_measured(tmp_path: Path) -> None:
    *_, last = points_of(ROWS[1], tmp_path, steps=2)
    assert last["blocks"] == 1.0
    assert 0 <= last["accuracy"] <= 1
