"""Notes on overrides before a run: keys that are set by what a part is, and parts of another kind."""

from typing import Any

import pytest

from xscale.commands.show.override_notes import notes
from xscale.commands.show.recipes import config_file
from xscale.core.compose import compose, compose_mapping
from xscale.recipe import decode_recipe

FFN = "model.stack.block.ffn"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["train.steps=50", "model.width=128"], []),
        (
            ["train.steps=20"],
            ["the warm-up of 40 steps does not fit train.steps=20 and is shortened: schedule.warmup_steps=2"],
        ),
        (["moe.capacity_factor=2"], ["moe.capacity_factor is set at model.stack.rules[0].ffn.capacity_factor"]),
        ([f"{FFN}.kind=moe"], [f"overrides change {FFN} from gated to moe: 8.92M parameters become 16.8M"]),
        ([f"{FFN}=moe"], [f"overrides change {FFN} from gated to moe: 8.92M parameters become 16.8M"]),
        (["optimizer.kind=lion"], ["overrides change optimizer from adamw to lion"]),
        (
            ["model.stack.rules[0].ffn.kind=dense", "schedule.kind=constant"],
            [
                "overrides change model.stack.rules[0].ffn from moe to dense: 8.92M parameters become 3.67M",
                "overrides change schedule from cosine to constant",
            ],
        ),
        (
            ["data.source={kind: text, paths: [a.txt]}", "model.width=128"],
            ["overrides change data.source from stdlib to text"],
        ),
        (
            [f"{FFN}.kind=dense", "model.width=128"],
            [
                f"overrides change {FFN} from gated to dense; with the other overrides of the model 8.92M parameters "
                "become 4.13M"
            ],
        ),
        (
            ["data.tokenizer.kind=byte"],
            ["overrides change data.tokenizer from sentencepiece to byte: 8.92M parameters become 7.97M"],
        ),
    ],
)
def test_overrides_are_told_with_what_they_change(overrides: list[str], expected: list[str]) -> None:
    composed = compose(config_file("quickstart"), overrides)
    assert notes(decode_recipe(composed), composed) == expected


def test_nothing_changes_where_an_override_completes_the_recipe() -> None:
    data: dict[str, Any] = {"optimizer": {"kind": "nothing"}}
    composed = compose_mapping(data, ["optimizer.kind=lion"])
    assert notes(decode_recipe(composed), composed) == []
