"""Recipes of variants have the values that their papers state, and say what differs."""

from typing import Any

import pytest

from tests.objectives_of_rows import PAGE, line
from xscale.commands.show import catalogue
from xscale.core.config import encode
from xscale.recipe import read

STATED = [
    ("gpt", "model.stack.block.mixer.dropout", 0.1),
    ("gpt", "model.stack.block.ffn.activation", "gelu_tanh"),
    ("gpt-2", "model.stack.block.mixer.dropout", 0.1),
    ("gpt-2", "model.stack.block.ffn.activation", "gelu_tanh"),
    ("gpt-3", "model.stack.block.ffn.activation", "gelu_tanh"),
    ("t5", "model.dropout", 0.1),
    ("t5", "model.encoder.block.dropout", 0.1),
    ("t5", "model.decoder.block.mixer.dropout", 0.1),
    ("prefix-task-objective", "model.decoder.block.dropout", 0.1),
    ("prefix-task-objective", "model.encoder.block.mixer.dropout", 0.1),
    ("bert", "model.stack.block.norm.eps", 1e-12),
    ("bert", "model.embedding_norm.eps", 1e-12),
    ("bert", "data.dupe_factor", 10),
    ("roberta", "data.dupe_factor", None),
    ("al-rfou-deep-char-lm", "model.stack.block.mixer.dropout", 0.55),
    ("fnet", "objective.kind", "masked_sentences"),
    ("fnet", "objective.task", "next"),
    # A window of its own, and one projection of each short segment, as in the paper's models of characters.
    ("transformer-ls", "model.stack.block.mixer.core.window", 64),
    ("transformer-ls", "model.stack.block.mixer.core.projection_rank", 1),
]
"""Variant, key and the value in its paper."""
SAID = [
    ("sparse-transformer", "odd ones see their own block"),
    ("relu-kernel-features", "1e-3 added before they are divided"),
    ("reformer-lsh", "counted once in each"),
    ("gshard", "square of the number of experts"),
    ("bert", "a tenth of the paper's are shorter"),
    ("gpt-3", "No dropout"),
    ("universal-transformer", "separable_conv"),
    ("spanbert", "3.5 tokens in the mean"),
    ("al-rfou-deep-char-lm", "feed-forward layers have none"),
]
"""Variant, and words of what it says to differ."""


def value_at(data: Any, path: str) -> Any:
    for name in path.split("."):
        data = data[name]
    return data


@pytest.mark.parametrize(("id", "path", "value"), STATED)
def test_a_value_is_that_of_the_paper(id: str, path: str, value: object) -> None:
    file = catalogue.recipe_file(id)
    assert file is not None
    assert value_at(encode(read(file, [])[0]), path) == value


@pytest.mark.parametrize(("id", "words"), SAID)
def test_what_differs_is_said(id: str, words: str) -> None:
    assert any(words in text for text in catalogue.row(id).deviations)


def test_the_state_space_of_s4_learns_more_slowly() -> None:
    file = catalogue.recipe_file("s4")
    assert file is not None
    groups = read(file, [])[0].optimizer.groups
    assert {group.match: group.lr_factor for group in groups} == {
        "*.log_decay": 0.1,
        "*.frequency": 0.1,
        "*.correction_*": 0.1,
        "*.b_*": 0.1,
        "*.log_step": 0.1,
    }


def cells(text: str) -> list[str]:
    """The cells of a line of the page, with the reason in the place of its number."""
    reasons = dict(
        item.split(". ", 1) for item in PAGE.read_text(encoding="utf-8").split("## Reasons\n\n")[1].splitlines()
    )
    return [reasons.get(cell.strip(), cell.strip()) for cell in text.split("|")[1:-1]]


@pytest.mark.parametrize(
    "id",
    [
        pytest.param(id, marks=() if id in ("disco", "fnet") else (pytest.mark.long, pytest.mark.sampled(8)))
        for id in catalogue.ids()
        if catalogue.recipe_file(id) is not None
    ],
)
def test_the_page_of_objectives_says_what_loads(id: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (said,) = [cells(text) for text in page.splitlines() if text.startswith(f"| `{id}` |")]
    reasons: dict[str, int] = {}
    made = line(id, reasons)
    texts = {str(number): reason for reason, number in reasons.items()}
    assert said == [texts.get(cell.strip(), cell.strip()) for cell in made.split("|")[1:-1]], (
        "run: python -m tests.objectives_of_rows --write"
    )
