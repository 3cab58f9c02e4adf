"""JSON of somebody else with millions of values: refused before they are made, within a bound of memory."""

import pytest

from tests.bounds import bounded
from xscale.core.files.file_safety import JSON_VALUES, decode_json

MANY = JSON_VALUES // 2 + 10
VALUES: dict[str, tuple[str, bool]] = {
    "objects": ("[" + "{}," * MANY + "1]", False),
    "lists": ("[" + "[]," * MANY + "1]", False),
    "numbers": ("[" + "1," * 2 * MANY + "1]", False),
    "keys": ("{" + '"a":1,' * 2 * MANY + '"b":1}', False),
    "a text of commas": ('{"a": "' + ",[{" * MANY + '"}', True),
    "a text of commas and quotes": ('{"a": "' + '\\",' * 2 * MANY + '"}', True),
    "texts across the blocks": ("[" + ('"' + "," * 999_983 + '\\\\",') * 30 + "1]", True),
    "short keys": ("{" + '"":1,' * 5 * MANY + '"b":1}', False),
    "a text without an end": ('{"a": "' + "," * 3 * MANY, False),
}
"""JSON of millions of separators -> whether it is read: those within a text make no values."""


@pytest.mark.parametrize("name", VALUES)
def test_json_of_millions_of_values_is_refused_before_they_are_made(name: str) -> None:
    content, is_read = VALUES[name]
    for form in (content, content.encode()):
        with bounded():
            if is_read:
                assert decode_json(form)
            else:
                with pytest.raises(ValueError, match=r"it has more than 4000000 values|Unterminated"):
                    decode_json(form)
