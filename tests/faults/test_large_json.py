"""JSON of millions of values is refused before these are made."""

from collections.abc import Callable

import pytest

from tests.bounds import bounded
from xscale.core.files.file_safety import JSON_VALUES, decode_json

MANY = JSON_VALUES // 2 + 10
VALUES: dict[str, tuple[Callable[[], str], bool]] = {
    "objects": (lambda: "[" + "{}," * MANY + "1]", False),
    "lists": (lambda: "[" + "[]," * MANY + "1]", False),
    "numbers": (lambda: "[" + "1," * 2 * MANY + "1]", False),
    "keys": (lambda: "{" + '"a":1,' * 2 * MANY + '"b":1}', False),
    "a text of commas": (lambda: '{"a": "' + ",[{" * MANY + '"}', True),
    "a text of commas and quotes": (lambda: '{"a": "' + '\\",' * 2 * MANY + '"}', True),
    "texts across the blocks": (lambda: "[" + ('"' + "," * 999_983 + '\\\\",') * 30 + "1]", True),
    "short keys": (lambda: "{" + '"":1,' * 5 * MANY + '"b":1}', False),
    "a text without an end": (lambda: '{"a": "' + "," * 3 * MANY, False),
}
"""JSON of millions of separators -> whether it is read: those within a text make no values."""


@pytest.mark.parametrize("name", VALUES)
def test_json_of_millions_of_values_is_refused_before_they_are_made(name: str) -> None:
    write, is_read = VALUES[name]
    content = write()
    for form in (content, content.encode()):
        with bounded():
            if is_read:
                assert decode_json(form)
            else:
                with pytest.raises(ValueError, match=r"it has more than 4000000 values|Unterminated"):
                    decode_json(form)
