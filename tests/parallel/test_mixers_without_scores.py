"""Mixers whose weights come from no queries and keys, on layouts that shard heads, channels and layers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import DOUBLE, Found, alone, asked, built, same, trained
from tests.parallel.models import changed
from tests.parallel.test_tensor import counted
from tests.train.test_layouts import one_rank
from tests.train.tiny import metrics
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.generate.decoders import incremental
from xscale.generate.generate import generate
from xscale.parallel.tensor import apply as tensor
from xscale.settings.settings import build_on_meta

MIXERS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "synthesizer", "heads": 4, "dropout": 0.1, "bias": True},
    "factorized_dense": {"kind": "synthesizer", "heads": 4, "generator": "factorized_dense", "factor_width": 5},
    "random": {"kind": "synthesizer", "heads": 4, "generator": "random", "dropout": 0.1},
    "fixed_random": {"kind": "synthesizer", "heads": 2, "generator": "random", "trainable": False},
    "factorized_random": {"kind": "synthesizer", "heads": 4, "generator": "factorized_random", "factor_columns": 3},
    "gaussian": {"kind": "hard_coded_gaussian", "heads": 4, "offsets": [-3, -1, 0], "sigmas": [1.0, 0.5], "bias": True},
    "average": {"kind": "average_attention", "hidden": 48},
}


def model(names: list[str], kind: str = "decoder") -> dict[str, Any]:
    """A block of each mixer, in turn."""
    rules = [{"every": len(names), "at": at, "mixer": MIXERS[name]} for at, name in enumerate(names)]
    block = {"ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
    stack = {"depth": len(names), "block": block, "rules": rules}
    return {"kind": kind, "width": 32, "position": "learned", "stack": stack}


DECODER = model([*MIXERS])
ENCODER = model([name for name in MIXERS if name != "average"], "encoder")
ATTENTION = {"kind": "attention", "heads": 4}
PAIR: dict[str, Any] = {
    "kind": "encoder_decoder",
    "width": 32,
    "position": "sinusoidal",
    "encoder": {"depth": 1, "block": {"mixer": MIXERS["dense"], "residual": "post", "dropout": 0.1}},
    "decoder": {
        "depth": 2,
        "block": {"mixer": MIXERS["average"], "cross": ATTENTION, "residual": "post", "dropout": 0.1},
    },
}
MODELS = {"decoder": DECODER, "encoder": ENCODER, "pair": PAIR}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    "1f1b": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "1f1b tp zero2": {
        "mesh": {"pp": 2, "tp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "1f1b"},
        "zero": {"stage": 2},
    },
    "sequence regathered": {
        "mesh": {"tp": 2},
        "tensor": {"sequence": True},
        "recompute": {"every": 2, "granularity": "selective", "regather_sequence_parallel_input": True},
    },
    "copies recomputed": {"mesh": {"dp_replicate": 2}, "recompute": {"every": 1}},
    "four of tp": {"mesh": {"tp": 4}, "tensor": {"sequence": True}},
}
QUICK = {("decoder", "tp"), ("decoder", "sequence"), ("pair", "sequence")}
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.long])
    for name in MODELS
    for layout in LAYOUTS
]


def with_four_heads(section: dict[str, Any]) -> dict[str, Any]:
    """The model, whose mixer of two heads has four: as many as ranks of tp."""
    return changed(section, stack__rules__3__mixer__heads=4) if "stack" in section else section


@pytest.fixture(scope="module")
def one() -> dict[str, Found]:
    """Runs of one process, by the model's name; each is made once."""
    return {}


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.sampled(3)
def test_a_layout_trains_as_one_process(name: str, layout: str, one: dict[str, Found], pool: Pool) -> None:
    parallel = LAYOUTS[layout]
    ranks = math.prod(parallel["mesh"].values())
    section = with_four_heads(MODELS[name]) if ranks == 4 else MODELS[name]
    key = f"{name} {section is MODELS[name]}"
    one[key] = one.get(key) or alone(pool, section)
    same(pool, one[key], ranks, section, parallel)


def test_heads_that_begin_elsewhere_are_seen(pool: Pool) -> None:
    """Negative control: the Gaussians of a rank that takes its heads for the first ones."""
    section = model(["gaussian"])
    with pytest.raises(AssertionError):
        same(pool, alone(pool, section), 2, changed(section, stack__rules__0__mixer__offsets=[-3, -1]), LAYOUTS["tp"])


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_sent_is_what_was_estimated(sequence: bool, pool: Pool) -> None:
    """An average attention network sums its hidden units before its gates."""
    parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
    section = {**model(["average", "dense"]), "position": "none"}
    recipe = asked(section, parallel, data={"sequence_length": 24})
    expected = sum(tensor.estimate(build_on_meta(recipe, 67), recipe.parallel, 24).values())
    section = changed(section, stack__rules__1__mixer__length=24)
    assert pool.run(counted, 2, section, parallel) == [expected] * 2


def written(parallel: dict[str, Any]) -> list[int]:
    """Text of the untrained decoder after a few tokens, token by token."""
    network = built(DECODER, parallel)[2]
    assert incremental(network)
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


def test_generation_on_two_ranks(pool: Pool) -> None:
    expected = pool.run(written, 1, {})[0]
    assert len(set(expected)) > 3
    for layout in ("tp", "sequence", "1f1b"):
        assert pool.run(written, 2, LAYOUTS[layout]) == [expected, expected]


@pytest.mark.parametrize("section", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_a_sharded_sequence_is_refused(section: dict[str, Any]) -> None:
    problems = [str(problem) for problem in asked(section, {"mesh": {"cp": 2}}).check(2)]
    kinds = {rule["mixer"]["kind"] for rule in section["stack"]["rules"]}
    assert len(problems) == len(kinds)
    for kind in kinds:
        assert any(f"mixer '{kind}' mixes the full sequence" in problem and "Take 1" in problem for problem in problems)


def test_channels_that_tp_does_not_divide_are_refused() -> None:
    section = {**model(["average"]), "width": 33}
    (problem,) = {str(problem) for problem in asked(section, {"mesh": {"tp": 2}}).check(2)}
    assert "tp=2 does not divide" in problem
    assert "33" in problem


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_resumes_alone(tmp_path: Path, pool: Pool) -> None:
    train: dict[str, Any] = {"steps": 4, "batch_size": 8, "micro_batch_size": 4, "eval_every": 2, "eval_sequences": 5}
    train |= {"baseline": False, "sample": {"prompts": ["def "], "tokens": 3}}
    common: dict[str, Any] = {"precision": DOUBLE, "model": DECODER}
    assert pool.run(one_rank, 1, tmp_path, "alone", train=train, **common) == [EXIT_DONE]
    stopped = {**train, "stop_after": 2}
    layout = LAYOUTS["sequence"]
    assert pool.run(one_rank, 2, tmp_path, "moved", train=stopped, parallel=layout, **common) == [EXIT_REQUEUE] * 2
    assert pool.run(one_rank, 1, tmp_path, "moved", train=train, **common) == [EXIT_DONE]
    for line, expected in zip(metrics(tmp_path, "moved"), metrics(tmp_path, "alone"), strict=True):
        for key in line.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert math.isclose(line[key], expected[key], rel_tol=1e-9), (key, line, expected)


def test_bfloat16_trains_near_double(pool: Pool) -> None:
    half = {"precision": {"compute": "bfloat16", "master": "float32"}}
    numbers = [pool.run(trained, 1, DECODER, {}, **sections)[0].numbers for sections in ({}, half)]
    for exact, rounded in zip(*numbers, strict=True):
        assert math.isclose(exact, rounded, rel_tol=0.03)
