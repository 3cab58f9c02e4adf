"""A config that leaves a choice open is refused with the name of the choice and the configs that make it."""

import re

import pytest

from xscale.core.compose import compose_mapping
from xscale.core.errors import ConfigError
from xscale.recipe import read_and_check

LEFT_OPEN = {
    # `use` -> the part that is not chosen, and the configs that the message names for it.
    "a layer's alone": ("model/attention_bigbird", "objective", ("objective/masked",)),
    "a layer's of another model": ("model/attention_longt5", "objective", ("objective/masked",)),
    "an objective's alone": (
        "objective/masked",
        "model",
        ("model/attention_bigbird", "model/attention_ccnet", "model/attention_local_2d", "model/attention_longformer"),
    ),
    "labels without examples": ("objective/classify", "data.source", ()),
}


def refusal(use: list[str], overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as refused:
        read_and_check(compose_mapping({"use": use}, overrides))
    return str(refused.value)


@pytest.mark.parametrize("case", LEFT_OPEN)
def test_the_missing_choice_is_named(case: str) -> None:
    use, part, configs = LEFT_OPEN[case]
    sentence = re.search(
        rf"No config chooses {part}, which has its default(?:: add (.*) to `use`)?\.", refusal([use], [])
    )
    assert sentence is not None
    assert tuple(re.findall(r"\w+/\w+", sentence[1] or "")) == configs


@pytest.mark.parametrize("case", [case for case, (_, _, configs) in LEFT_OPEN.items() if configs])
def test_a_config_that_is_named_works(case: str) -> None:
    use, _, configs = LEFT_OPEN[case]
    for name in configs:
        read_and_check(compose_mapping({"use": [use, name]}, []))


def test_a_choice_that_was_made_is_not_called_missing() -> None:
    """Neither one of the command line nor one of a file."""
    assert "No config chooses" not in refusal(["model/attention_bigbird"], ["objective.kind=causal"])
    assert "No config chooses" not in refusal(["model/attention_bigbird", "objective/causal"], [])


def test_a_key_of_the_default_is_no_choice() -> None:
    assert "No config chooses objective" in refusal(["model/attention_bigbird"], ["objective.label_smoothing=0.1"])
