"""Mixers that read near tokens, on layouts that shard heads, layers and the sequence."""

import math
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, asked, built, same
from xscale.generate.decoders import incremental
from xscale.generate.generate import generate
from xscale.parallel import context
from xscale.parallel.context.neighbours import needed_positions
from xscale.settings.settings import build_on_meta

MIXERS: dict[str, dict[str, Any]] = {
    "light": {"kind": "lightweight_conv", "heads": 4, "kernel_sizes": [5], "dropout": 0.2, "bias": True},
    "dynamic": {"kind": "lightweight_conv", "heads": 4, "dynamic": True, "kernel_sizes": [3], "dropout": 0.2},
    "wide": {"kind": "lightweight_conv", "heads": 4, "dynamic": True, "bias": True, "kernel_sizes": [17]},
    "dilated": {"kind": "lightweight_conv", "heads": 4, "kernel_sizes": [4], "dilations": [3], "glu": False},
    "branches": {
        "kind": "long_short_range",
        "long_range": {"kind": "attention", "heads": 4},
        "short_range": {"kind": "lightweight_conv", "heads": 4, "dynamic": True, "kernel_sizes": [5], "dropout": 0.2},
    },
}
RECURRENT = {"kind": "local_rnn", "window": 4}
ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4}


def model(names: list[str], kind: str = "decoder", **mixers: dict[str, Any]) -> dict[str, Any]:
    """A block of each mixer, in turn."""
    every = MIXERS | mixers
    rules = [{"every": len(names), "at": at, "mixer": every[name]} for at, name in enumerate(names)]
    block = {"ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
    stack = {"depth": len(names), "block": block, "rules": rules}
    return {"kind": kind, "width": 32, "position": "learned", "stack": stack}


EVOLVED = {
    "glu": {"part": "ffn", "ffn": {"kind": "glu", "bias": True}},
    "encoder": {"part": "mixer", "mixer": {"kind": "evolved_branches", "form": "encoder", "dropout": 0.2}},
    "decoder": {"part": "mixer", "mixer": {"kind": "evolved_branches", "dropout": 0.2}},
    "parallel": {"part": "mixer", "mixer": ATTENTION, "parallel": True},
}


def evolved(kind: str) -> dict[str, Any]:
    """Both forms of the branches, with attention parallel to one of them."""
    sublayers = [EVOLVED[name] for name in ("glu", "encoder", "decoder", "parallel")]
    stack = {"depth": 2, "block": {"sublayers": sublayers, "dropout": 0.1}}
    return {"kind": kind, "width": 32, "position": "learned", "stack": stack}


def separable(kind: str) -> dict[str, Any]:
    """Attention, and the transition of separable convolutions."""
    block = {"mixer": ATTENTION, "ffn": {"kind": "separable_conv", "hidden": 48}, "dropout": 0.1}
    return {"kind": kind, "width": 32, "position": "learned", "stack": {"depth": 2, "block": block}}


CONVOLUTIONS = ["light", "dynamic", "wide", "dilated"]
MODELS = {
    "decoder": model(CONVOLUTIONS),
    "encoder": model(CONVOLUTIONS, "encoder"),
    "branches": model(["branches", "branches"]),
    "evolved": evolved("decoder"),
    "evolved encoder": evolved("encoder"),
    "separable": separable("decoder"),
    "separable encoder": separable("encoder"),
    "recurrent": model(["recurrent", "softmax"], recurrent=RECURRENT, softmax=ATTENTION),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "cp": {"mesh": {"cp": 2}},
    "ring": {"mesh": {"cp": 2}, "context": {"style": "ring"}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "cp tp": {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}},
    "four of cp": {"mesh": {"cp": 4}},
    "cp zero3 recomputed": {"mesh": {"cp": 2, "dp_shard": 2}, "zero": {"stage": 3}, "recompute": {"every": 1}},
}
QUICK = {
    ("decoder", "tp"),
    ("decoder", "cp"),
    ("encoder", "cp"),
    ("branches", "cp tp"),
    ("recurrent", "cp"),
    ("evolved", "cp"),
    ("separable encoder", "cp tp"),
}
NOT_OVER_TP = ("recurrent", "evolved", "evolved encoder")
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.long, pytest.mark.sampled(6)])
    for name in MODELS
    for layout in LAYOUTS
    if name not in NOT_OVER_TP or "tp" not in LAYOUTS[layout]["mesh"]
]


@pytest.fixture(scope="module")
def one() -> dict[str, Found]:
    """Runs of one process, by the model's name; each is made once."""
    return {}


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.sampled(5)
def test_a_layout_trains_as_one_process(name: str, layout: str, one: dict[str, Found], pool: Pool) -> None:
    parallel = LAYOUTS[layout]
    one[name] = one.get(name) or alone(pool, MODELS[name])
    same(pool, one[name], math.prod(parallel["mesh"].values()), MODELS[name], parallel)


def written(parallel: dict[str, Any]) -> list[int]:
    """Text of the untrained decoder after a few tokens, token by token."""
    network = built(MODELS["decoder"], parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_generation_on_two_ranks(pool: Pool) -> None:
    expected = pool.run(written, 1, {})[0]
    assert len(set(expected)) > 3
    for layout in ("tp", "cp"):
        assert pool.run(written, 2, LAYOUTS[layout]) == [expected, expected]


def test_only_what_is_read_is_sent() -> None:
    """Five ranks of four tokens, of which the last two have one and none."""
    plans = [[needed_positions(rank, owner, 4, 13, 5, 2) for owner in range(5)] for rank in range(5)]
    assert plans == [
        [[], [0, 1], [], [], []],
        [[0, 1, 2, 3], [], [0, 1], [], []],
        [[3], [0, 1, 2, 3], [], [0], []],
        [[], [3], [0, 1, 2, 3], [], []],
        [[], [], [], [], []],
    ]
    recipe = asked(model(["light", "dynamic"]), {"mesh": {"cp": 2, "tp": 2}}, data={"sequence_length": 64})
    sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, 64)
    # Four and two tokens go from the first rank to the second, each with half of the channels.
    assert sent == {"neighbours": (4 + 2) * 16 / 2}


@pytest.mark.parametrize(
    ("name", "kind"), [("recurrent", "local_rnn"), ("evolved", "evolved_branches"), ("evolved", "glu")]
)
def test_what_has_no_heads_is_not_sharded_over_tp(name: str, kind: str) -> None:
    problems = {str(problem) for problem in asked(MODELS[name], {"mesh": {"tp": 2}}).check(2)}
    assert any(
        f"'{kind}' has neither heads nor hidden units" in problem and "Take 1" in problem for problem in problems
    )


def test_more_ranks_than_heads_are_refused() -> None:
    problems = {
        str(problem) for problem in asked(model(["light"]), {"mesh": {"tp": 3}}, train={"batch_size": 9}).check(3)
    }
    assert any("tp=3 does not divide heads=4" in problem and "1, 2 or 4" in problem for problem in problems), problems
