"""Errors that say what would work."""

import pickle

import pytest

from xscale.core.errors import ConfigError, Problem, nearest


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(Problem("a.b", "it is odd", "Take an even one.")) == "a.b: it is odd. Take an even one."
    assert str(Problem("", "it is odd")) == "it is odd"


def test_an_error_carries_every_problem() -> None:
    two = ConfigError([Problem("a", "x"), Problem("b", "y", "Do z.")])
    assert [problem.path for problem in two.problems] == ["a", "b"]
    assert str(two) == "a: x\nb: y. Do z."
    assert ConfigError("a", "x", "Do z.").problems == (Problem("a", "x", "Do z."),)
    assert ConfigError(Problem("a", "x")).problems == (Problem("a", "x"),)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("widht", "Did you mean 'width'?"),
        ("zzz", "Known: depth, heads, width."),
        ("WIDTH", "Known: depth, heads, width."),
    ],
)
def test_the_nearest_name_is_offered(word: str, said: str) -> None:
    assert nearest(word, ["width", "heads", "depth"]) == said


def test_nothing_known_nothing_offered() -> None:
    assert nearest("a", []) == ""


def test_problems_without_end_are_counted() -> None:
    error = ConfigError([Problem("a", str(number)) for number in range(1000)])
    assert len(error.problems) == 120
    assert str(error.problems[-1]) == "881 more problems"
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_a_message_is_one_line_without_escapes() -> None:
    problem = Problem("a\nb", "what \x1b[2J\r\n and more", "x" * 10_000)
    assert str(problem) == f"a b: what \\x1b[2J  and more. {'x' * 2000}..."


def test_a_message_on_a_word_without_end_is_cut() -> None:
    """An override from anybody is the path of its problem, and may be quoted as well."""
    word = "[" * 100_000
    assert len(str(Problem(word, f"'{word}' is no key", "Write key=value."))) < 3000
    assert str(Problem("model.stack.depth", "must be at least 1")) == "model.stack.depth: must be at least 1"
