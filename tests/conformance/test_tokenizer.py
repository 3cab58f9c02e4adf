"""Every tokenizer: what its traits promise, and what all of them do."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.checked import each_case
from tests.families import each, family
from xscale.conformance import tokenizer as suite
from xscale.conformance.check import Arguments, Check
from xscale.core.registry import Entry
from xscale.data.tokenizer.tokenizer import special_tokens

TOKENIZERS = family("tokenizer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {entry.name: tmp_path_factory.mktemp(entry.name) for entry in TOKENIZERS}


@each_case(suite)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments, tmp_path: Path) -> None:
    check.run(arguments, tmp_path)


@each(TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(text=st.text() | st.lists(st.sampled_from([*special_tokens(2), " ", "\n", "▁", "a", "\r", "𝄞"])).map("".join))
def test_what_is_lossless_gives_drawn_texts_back(entry: Entry[Any], folders: dict[str, Path], text: str) -> None:
    suite.gives_back(entry, suite.built(entry, folders[entry.name]), text)
