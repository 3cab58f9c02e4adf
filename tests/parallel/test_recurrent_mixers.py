"""Mixers with a recurrent state on layouts that shard heads, layers, parameters and the sequence."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, built, same
from tests.parallel.test_tensor import counted
from xscale.generate.decoders import incremental
from xscale.generate.generate import generate
from xscale.parallel import context
from xscale.parallel.tensor import apply as tensor
from xscale.settings.settings import build_on_meta

MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"kind": "mamba2", "heads": 4, "states": 6},
    "groups": {"kind": "mamba2", "heads": 4, "states": 6, "groups": 2, "bias": True},
    "gated_delta_net": {"kind": "gated_delta_net", "heads": 4, "key_heads": 2},
    "gla": {"kind": "gated_linear_attention", "heads": 4},
    "rwkv7": {
        "kind": "rwkv7",
        "heads": 4,
        "decay_latent_width": 5,
        "rate_latent_width": 6,
        "gate_latent_width": 7,
    },
}


def model(names: list[str]) -> dict[str, Any]:
    """A block of each mixer, in turn."""
    rules = [{"every": len(names), "at": at, "mixer": MIXERS[name]} for at, name in enumerate(names)]
    block = {"ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
    stack = {"depth": len(names), "block": block, "rules": rules}
    return {"kind": "decoder", "width": 32, "position": "none", "stack": stack}


ALL = model(list(MIXERS))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"mesh": {"tp": 2}}),
    "sequence": (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "zero3": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}, "recompute": {"every": 1}}),
    "cp": (2, {"mesh": {"cp": 2}, "recompute": {"every": 1}}),
    "cp 4": (4, {"mesh": {"cp": 4}, "context": {"style": "ring"}}),
    "cp 2 tp 2": (4, {"mesh": {"cp": 2, "tp": 2}, "zero": {"stage": 3}}),
}


@pytest.mark.long
@pytest.mark.parametrize("cross_documents", [False, True], ids=["documents", "one document"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(layout: str, cross_documents: bool, pool: Pool) -> None:
    """The sequence of 23 tokens is padded for cp; documents end within the ranks' shards and go on over their ends."""
    ranks, parallel = LAYOUTS[layout]
    sections = {"data": {"cross_documents": cross_documents}}
    same(pool, alone(pool, ALL, **sections), ranks, ALL, parallel, **sections)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_tp_sends_is_what_was_estimated(sequence: bool, pool: Pool) -> None:
    """Mamba-2 gathers the channels of all heads for its norm."""
    parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
    section, data = model(["mamba2", "gated_delta_net"]), {"sequence_length": 24}
    recipe = asked(section, parallel, data=data)
    expected = sum(tensor.estimate(build_on_meta(recipe, 67), recipe.parallel, 24).values())
    assert pool.run(counted, 2, section, parallel, data=data) == [expected] * 2


def test_cp_sends_states_whatever_the_length() -> None:
    """Each rank sends the state of its heads, and how its shard takes one on, to the others; and their neighbours."""
    for length in (64, 4096):
        recipe = asked(
            model(["mamba2", "gated_delta_net"]), {"mesh": {"cp": 4, "tp": 2}}, data={"sequence_length": length}
        )
        sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, length)
        states = 2 * (6 * 16 + 1) + 2 * (6 * 6 + 6 * 12)
        # Three ranks send three tokens to the next one: channels of heads are sharded over tp, B and C are not.
        channels = 64 / 2 + 2 * 6 + (2 * 2 * 6 + 4 * 12) / 2
        assert sent == {"scan": 3 * states, "neighbours": channels * 3 * 3 / 4}


@pytest.mark.parametrize(
    ("name", "tp", "says"),
    [("mamba2", 3, "tp=3 does not divide heads=4"), ("gated_delta_net", 4, "tp=4 does not divide key_heads=2")],
)
def test_heads_that_tp_does_not_divide_are_refused(name: str, tp: int, says: str) -> None:
    problems = [str(problem) for problem in asked(model([name]), {"mesh": {"tp": tp}}).check(tp)]
    assert any(says in problem and "Take 1" in problem for problem in problems), problems


def written(parallel: dict[str, Any]) -> list[int]:
    """Text of the untrained decoder after a few tokens, token by token."""
    network = built(ALL, parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_generation_on_two_ranks(pool: Pool) -> None:
    expected = pool.run(written, 1, {})[0]
    assert len(set(expected)) > 3
    for layout in ("tp", "cp"):
        assert pool.run(written, 2, LAYOUTS[layout][1]) == [expected, expected]
