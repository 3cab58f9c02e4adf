"""Mixers and cores without a style of context parallelism run on the gathered sequence, where that is asked for."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, same
from tests.train.tiny import recipe
from xscale.parallel import context
from xscale.planning.format import format_plan
from xscale.planning.plan import plan
from xscale.settings.settings import build_on_meta

MIXERS: dict[str, dict[str, Any]] = {
    "average_attention": {"kind": "average_attention"},
    "synthesizer": {"kind": "synthesizer", "heads": 4, "generator": "factorized_random", "factor_columns": 4},
    "hard_coded_gaussian": {"kind": "hard_coded_gaussian", "heads": 4},
    "dynamic_mask": {"kind": "dynamic_mask", "heads": 4},
    "dynamic_span": {"kind": "dynamic_span", "heads": 4, "ramp": 4, "span_loss_weight": 0.1},
    "guided_attention": {"kind": "guided_attention", "heads": 4, "patterns": ["previous"], "guidance_weight": 0.5},
    "multi_linear": {"kind": "multi_linear", "factors": 8, "blocks": 2},
    "gmlp": {"kind": "gmlp", "hidden": 48},
    "talking_heads": {"kind": "attention", "heads": 4, "core": {"kind": "talking_heads"}, "dropout": 0.1},
    "evolving": {"kind": "attention", "heads": 4, "core": {"kind": "evolving"}},
    "disagreement": {"kind": "attention", "heads": 4, "core": {"kind": "disagreement", "output_weight": 0.5}},
}


OF_ALL_TOKENS = ("gmlp",)
"""Mixers that do not mask documents from each other."""


def model(name: str, **more: Any) -> dict[str, Any]:
    """A decoder with two blocks of this mixer."""
    block = {"mixer": MIXERS[name], "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1, **more}
    return {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": block}}


def layout(**mesh: int) -> dict[str, Any]:
    return {"mesh": {"cp": 2, **mesh}, "context": {"gather": True}}


@pytest.mark.parametrize("name", MIXERS)
def test_it_gives_the_numbers_of_one_process(name: str, pool: Pool) -> None:
    """Also auxiliary losses (spans, guidance, disagreement), which each rank computes on the full sequence."""
    data = {"data": {"cross_documents": name in OF_ALL_TOKENS}}
    same(pool, alone(pool, model(name), **data), 2, model(name), layout(), **data)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "more"),
    [
        ("talking_heads", {"pp": 2}, {}),
        ("synthesizer", {"tp": 2}, {"zero": {"stage": 3}}),
        ("dynamic_span", {"cp": 4}, {}),
    ],
    ids=["stages", "heads over tp", "four ranks"],
)
def test_beside_other_axes(name: str, mesh: dict[str, int], more: dict[str, Any], pool: Pool) -> None:
    same(pool, alone(pool, model(name)), 4, model(name), {**layout(**mesh), **more})


def test_cross_attention_gathers_both_sequences(pool: Pool) -> None:
    stack = model("talking_heads")["stack"]
    network = {
        "kind": "encoder_decoder",
        "width": 32,
        "encoder": {**stack, "depth": 1},
        "decoder": {**stack, "depth": 1},
    }
    same(pool, alone(pool, network), 2, network, layout())


def checked(network: dict[str, Any], gather: bool) -> str:
    """The problems of a recipe on two ranks of cp."""
    parallel = {"mesh": {"cp": 2}, "context": {"gather": gather}}
    return " ".join(map(str, recipe(Path("nowhere"), model=network, parallel=parallel).check(2)))


@pytest.mark.parametrize("name", ["synthesizer", "evolving"])
def test_a_refusal_names_it(name: str) -> None:
    assert "parallel.context.gather=true" in checked(model(name), gather=False)
    assert checked(model(name), gather=True) == ""


def test_shards_of_a_shard_are_refused() -> None:
    parallel = {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}, "context": {"gather": True}}
    problems = recipe(Path("nowhere"), model=model("synthesizer"), parallel=parallel).check(4)
    assert "mixers on the gathered sequence read all of it" in " ".join(map(str, problems))


def test_scores_of_all_heads_are_not_handed_to_a_mixer_with_some() -> None:
    network = model("evolving")
    network["stack"]["rules"] = [
        {"last": 1, "mixer": {"kind": "attention", "heads": 4, "core": {"kind": "prior_scores"}}}
    ]
    assert "attention scores pass between mixers on the gathered sequence" in checked(network, gather=True)


def test_the_estimate_counts_the_gathered_input() -> None:
    network = model("synthesizer")
    network["stack"]["rules"] = [{"last": 1, "mixer": {"kind": "attention", "heads": 4}}]
    settings = recipe(Path("nowhere"), model=network, parallel=layout())
    sent = context.estimate(build_on_meta(settings, 67), settings.parallel, 24)
    assert sent == {"gather": 32 * 12, "ulysses": 4 * 32 * 12 / 2}


def test_a_plan_lists_the_gathered_mixers() -> None:
    network = model("synthesizer")
    network["stack"]["rules"] = [{"last": 1, "mixer": {"kind": "attention", "heads": 4}}]
    figures = plan(recipe(Path("nowhere"), model=network, parallel=layout()), 2)
    assert figures["context_styles"] == {"gather": ["stack.blocks.1.mixer"], "ulysses": ["stack.blocks.0.mixer"]}
    text = "\n".join(format_plan(figures))
    assert "context    gather in 1, ulysses in 1 of 2 modules that read other shards" in text
    assert "gather, with the time and memory of cp=1: stack.blocks.1.mixer\n" in text
    figures = plan(recipe(Path("nowhere"), model=network), 1)
    assert figures["context_styles"] == {}
    assert "context " not in "\n".join(format_plan(figures))
