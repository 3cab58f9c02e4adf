"""Advice of a command for a word that it does not know: the key, the recipe or the part that was meant, or none."""

import pytest
from typer.testing import CliRunner

from xscale.cli.main import app
from xscale.commands.show.recipes import FAMOUS, run_recipes
from xscale.core.errors import ConfigError

TYPED = {
    "an option of other trainers": (
        "train quickstart --steps 10",
        "Settings are given as key=value: train.steps=VALUE.",
    ),
    "one with its value": ("train quickstart --lr=0.1", "key=value: optimizer.lr=0.1."),
    "one by its name elsewhere": ("plan quickstart --learning-rate 3", "key=value: optimizer.lr=VALUE."),
    "a misspelt option": ("train quickstart --print-confg", "Did you mean --print-config?"),
    "a number of a benchmark": ("bench train quickstart --max-steps 3", "Did you mean --steps?"),
    "an unknown option": ("plan quickstart --zzz", "Settings are given as key=value: train.steps=VALUE."),
    "a famous model": ("train llama", "The recipe 'dense_7b' has LLaMA 2's 7B shape."),
    "one of its sizes": ("train Llama-3-8B", "The recipe 'dense_7b' has"),
    "a famous mixture": ("train mixtral", "The recipe 'mixtral_8x7b' has"),
    "a misspelt recipe": ("train quickstrat", "Did you mean 'quickstart'?"),
    "no recipe": ("train qqq", "`xscale list recipes` and `xscale list xformers` show them."),
    "a key of another source": (
        "train quickstart data.source.paths=x.txt",
        "unknown key for source 'stdlib'. It is a key of jsonl, labelled, pairs, parquet, text: choose one, as by "
        "data.source.kind=jsonl.",
    ),
    "a key of another ffn": ("train quickstart model.stack.block.ffn.experts=4", "It is a key of moe: choose one"),
    "a misspelt key of a part": ("train small model.stack.block.ffn.hiden=4", "Did you mean 'hidden'?"),
}


@pytest.mark.parametrize("name", TYPED)
def test_what_is_advised(name: str) -> None:
    typed, advice = TYPED[name]
    found = CliRunner().invoke(app, typed.split())
    assert isinstance(found.exception, ConfigError), found.output
    assert advice in str(found.exception)


def test_the_value_of_an_option_is_no_option() -> None:
    found = CliRunner().invoke(app, ["plan", "quickstart", "--device", "--zzz", "--check"])
    assert "no such option" not in str(found.exception)


def test_recipes_that_stand_for_famous_models_are_there() -> None:
    assert {recipe for recipe, _ in FAMOUS.values()} <= set(run_recipes())
