"""Overrides in the messages of the program are typed as they stand: those with brackets or braces are in quotes."""

import ast
import re
from pathlib import Path

import pytest

from xscale.core.choices import Choice, sentence
from xscale.core.yaml_writer import override_word

ROOT = Path(__file__).parents[2]
TEXTS = [
    (f"{file.relative_to(ROOT)}:{node.lineno}", node.value)
    for package in ("xscale", "launch/xscale_launch")
    for file in sorted((ROOT / package).rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]
BARE = re.compile(r"(?<!['\w.])[a-z_]+(?:\.[a-z_]+)+(?:=[\[{*]|\[[\d*]?\][\w.]*=)")
"""A dotted key, not behind a quote, with brackets or braces in its path or its value."""


def test_no_message_has_an_override_that_a_shell_would_take_for_a_pattern() -> None:
    assert [place for place, text in TEXTS if BARE.search(text)] == []


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("Set model.stack.rules[0].every=2.", True),
        ("Write run.allow_links=[wandb].", True),
        ("Write 'run.allow_links=[wandb]'.", False),
        ("model.stack.rules.0.every=2", False),
    ],
)
def test_what_is_bare(text: str, bare: bool) -> None:
    """Negative control."""
    assert bool(BARE.search(text)) is bare


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([("train.steps", 20)], "Take train.steps=20."),
        ([("model.stack.exits.blocks", [2])], "Take 'model.stack.exits.blocks=[2]'."),
        ([("model.stack.rules[0].every", 2)], "Take 'model.stack.rules[0].every=2'."),
        ([("core dense:heads", [2])], "Take heads=[2] of the core 'dense'."),
        ([("optimizer.lr", 1), ("data.blend", [])], "Take optimizer.lr=1 and 'data.blend=[]'."),
    ],
)
def test_advice_is_quoted(edits: list[tuple[str, object]], said: str) -> None:
    assert sentence((Choice(tuple(edits)),), "other.key") == said


def test_the_word_of_a_shell() -> None:
    assert override_word("train.steps", 20) == "train.steps=20"
    assert override_word("data.blend", []) == "'data.blend=[]'"
