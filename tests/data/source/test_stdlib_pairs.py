"""Functions and their summaries: pairs of real code and text, the same each time, on every machine."""

import ast
import re
from pathlib import Path

import pytest

from xscale.data.source.stdlib_pairs import StdlibPairs

MODULE = '''"""A module."""

class Thing:
    def method(self, x):  # a comment
        """Return x
        doubled.

        More is said.
        """
        def inner():
            "Inner."
            return 1

        return x * 2

    async def wait(
        self,
    ):
        r\'\'\'Wait.\'\'\'
        await self


def only_a_docstring():
    """There is no code."""


def no_docstring():
    return """no docstring"""


def blank():
    """ """
    return 1


def unindented():
    """Ends
here."""
    return 1


@decorated
def last(): return 1
'''


def test_each_function_with_a_docstring_and_a_body_is_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "other.py").write_bytes("# é\n".encode("latin-1"))
    documents = list(StdlibPairs(StdlibPairs.Config()).documents())
    assert [(one.name, one.target) for one in documents] == [
        ("module.py:4", "Return x doubled."),
        ("module.py:10", "Inner."),
        ("module.py:16", "Wait."),
    ]
    for document in documents:
        (function,) = ast.parse(document.text).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
    assert documents[1].text == "def inner():\n    return 1"


def test_the_library_has_thousands() -> None:
    source = StdlibPairs(StdlibPairs.Config())
    (json_decoder,) = [one for one in source.byte_ranges() if one.file.endswith("json/decoder.py")]
    summaries = [one.target for one in source.read(json_decoder)]
    assert any("Decode a JSON document" in str(summary) for summary in summaries)
    assert sum(1 for _, document in zip(range(1000), source.documents(), strict=False)) == 1000


def test_the_python_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    source = StdlibPairs(StdlibPairs.Config())
    before = source.identity()
    monkeypatch.setattr("platform.python_version", lambda: "4.0.0")
    assert before != source.identity()


def test_several_tasks_have_their_names_before_their_sources() -> None:
    plain, tasks = StdlibPairs(StdlibPairs.Config()), StdlibPairs(StdlibPairs.Config(tasks=("summary", "name")))
    assert "tasks" not in plain.identity(), "data of one task is found where it was prepared before"
    (byte_range,) = [each for each in plain.byte_ranges() if each.file.endswith("/textwrap.py")]
    pairs, documents = list(plain.read(byte_range)), list(tasks.read(byte_range))
    assert len(documents) == 2 * len(pairs) > 4
    for pair, summary, name in zip(pairs, documents[::2], documents[1::2], strict=True):
        assert (summary.text, summary.target) == (f"summary: {pair.text}", pair.target)
        assert name.target is not None
        assert pair.text.startswith(f"def {name.target}(")
        assert name.text.startswith("name: def _(")
        assert not re.search(rf"\b{name.target}\b", name.text)
    assert len({each.name for each in documents}) == len(documents)
