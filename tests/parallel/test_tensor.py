"""Tensor parallelism gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed import Pool
from tests.families import example
from tests.parallel.against_one import DOUBLE, Found, alone, built, compare, same, trained
from tests.parallel.models import DENSE, MIXTURE, SPARSE, changed
from tests.train.test_layouts import one_rank
from tests.train.tiny import metrics, recipe
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.generate.generate import generate
from xscale.mesh import collectives
from xscale.nn.attention.core import CORES
from xscale.nn.tokens import Tokens
from xscale.parallel.tensor import apply as tensor
from xscale.parallel.tensor import vocabulary
from xscale.settings.settings import build_on_meta

NOISY = changed(DENSE, stack__block__mixer__dropout=0.1)
"""Dropout of attention weights, which are cut by heads."""


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Found:
    """A dense decoder on one process."""
    return alone(pool, DENSE)


@pytest.mark.parametrize(
    ("model", "ranks", "parallel"),
    [
        pytest.param(DENSE, 4, {"mesh": {"tp": 4}}, marks=pytest.mark.long),
        pytest.param(NOISY, 2, {"mesh": {"tp": 2}, "recompute": {"every": 1}}, marks=pytest.mark.long),
        pytest.param(SPARSE, 2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}, marks=pytest.mark.long),
    ],
    ids=["tp4", "attention-dropout", "patterns"],
)
def test_what_the_axes_have_not(model: dict[str, Any], ranks: int, parallel: dict[str, Any], pool: Pool) -> None:
    """Fewer kv_heads than a quarter, dropout inside attention, and patterns of heads."""
    same(pool, alone(pool, model), ranks, model, parallel)


def test_dropout_inside_experts(pool: Pool) -> None:
    """The hidden units that are dropped are one process's, of which each rank has half."""
    expert = {"kind": "gated", "hidden": 16}
    ffn = {"kind": "moe", "experts": 4, "expert": expert, "expert_dropout": 0.2}
    model = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": {"ffn": ffn}}}
    same(pool, alone(pool, model), 2, model, {"mesh": {"tp": 2}})


def with_core(name: str) -> dict[str, Any]:
    """A model of one block around that core, and the objective and data it can learn by: sections of a recipe."""
    entry = CORES.get(name)
    core = encode(example(entry))
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "shared_qk": False, "core": core}
    block = {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 16}}
    model = {
        "kind": "decoder" if entry.traits.causal else "encoder",
        "width": 32,
        "stack": {"depth": 1, "block": block},
    }
    objective = {"kind": "causal" if entry.traits.causal else "masked"}
    return {"model": model, "objective": objective, "data": {"cross_documents": not entry.traits.documents}}


def every_core(parallel: dict[str, Any]) -> dict[str, Found]:
    """Train each core whose heads are computed apart."""
    recipes = {name: with_core(name) for name in CORES.able(per_head=True)}
    return {name: trained(parallel=parallel, steps=1, **sections) for name, sections in recipes.items()}


@pytest.mark.long
def test_every_core_that_promises_heads_apart(pool: Pool) -> None:
    one = pool.run(every_core, 1, {})[0]
    ranks = pool.run(every_core, 2, {"mesh": {"tp": 2}})
    assert len(one) > 5
    wrong = {}
    for name, found in one.items():
        try:
            compare(found, [rank[name] for rank in ranks])
        except AssertionError as error:
            wrong[name] = str(error)[:300]
    assert wrong == {}


def written(model: dict[str, Any], parallel: dict[str, Any]) -> list[int]:
    """Text of the untrained model after a few tokens."""
    network = built(model, parallel)[2]
    return generate(network, torch.tensor([20, 30, 40]), 9, end=1, temperature=0.8, seed=3).tolist()


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_generation(model: dict[str, Any], pool: Pool) -> None:
    """One token at a time does not divide by the ranks; each rank draws from all words' logits."""
    expected = pool.run(written, 1, model, {})[0]
    assert len(set(expected)) > 3
    for sequence in (False, True):
        parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
        assert pool.run(written, 2, model, parallel) == [expected, expected]


def test_a_checkpoint_of_two_ranks_goes_on_alone(tmp_path: Path, pool: Pool) -> None:
    train: dict[str, Any] = {"steps": 4, "batch_size": 8, "micro_batch_size": 4, "eval_every": 2, "eval_sequences": 5}
    train |= {"baseline": False, "sample": {"prompts": ["def "], "tokens": 3}}
    common: dict[str, Any] = {"precision": DOUBLE, "model": DENSE}
    layout = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
    assert pool.run(one_rank, 1, tmp_path, "alone", train=train, **common) == [EXIT_DONE]
    stopped = {**train, "stop_after": 2}
    assert pool.run(one_rank, 2, tmp_path, "moved", train=stopped, parallel=layout, **common) == [EXIT_REQUEUE] * 2
    assert pool.run(one_rank, 1, tmp_path, "moved", train=train, **common) == [EXIT_DONE]
    for line, expected in zip(metrics(tmp_path, "moved"), metrics(tmp_path, "alone"), strict=True):
        for key in line.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert math.isclose(line[key], expected[key], rel_tol=1e-9), (key, line, expected)


def counted(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> float:
    """Numbers sent over tp in a forward of one sequence, as seen by who sends them."""
    _, mesh, network, _ = built(model, parallel, **sections)
    ranks = mesh.degrees.tp
    sent = []

    def counting(true: Any, times: float) -> Any:
        def call(x: torch.Tensor, *others: Any) -> Any:
            sent.append(times * x.numel())
            return true(x, *others)

        return call

    tokens = torch.randint(19, 60, (1, 24))
    share = (ranks - 1) / ranks
    with ExitStack() as stack:
        for where, name, times in (
            (collectives, "all_reduce", 2 * share),
            (collectives, "reduce_scatter", share),
            (collectives, "all_gather", ranks - 1),
            (vocabulary, "all_gather", ranks - 1),
        ):
            stack.enter_context(patch.object(where, name, counting(getattr(where, name), times)))
        with torch.no_grad():
            network.eval()(Tokens.from_ids(tokens), tokens)
    return sum(sent)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_sent_is_what_was_estimated(sequence: bool, pool: Pool) -> None:
    parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
    one = recipe(Path("x"), model=DENSE, parallel=parallel)
    expected = sum(tensor.estimate(build_on_meta(one, 67), one.parallel, 24).values())
    assert pool.run(counted, 2, DENSE, parallel) == [expected] * 2


@pytest.mark.nightly
def test_compiled_blocks_draw_the_same_noise(pool: Pool) -> None:
    """Dropout does not depend on a rank's graph: ranks of tp would drift apart."""
    model = one_block(mixer={"kind": "attention", "heads": 4, "bias": True}, dropout=0.1)
    one = pool.run(trained, 1, model, {}, steps=2)[0]
    for sequence in (False, True):
        parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}, "compile": True}
        compare(one, pool.run(trained, 2, model, parallel, steps=2))


def refused(model: dict[str, Any], world: int, **parallel: Any) -> list[str]:
    """Problems that `check` returns for so many ranks."""
    objective = {"kind": {"encoder": "masked", "encoder_decoder": "span"}.get(model["kind"], "causal")}
    data = {"cross_documents": True}
    asked = recipe(Path("x"), model=model, objective=objective, data=data, parallel=parallel)
    return [str(problem) for problem in asked.check(world)]


def one_block(kind: str = "decoder", **block: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "width": 48,
        "stack": {"depth": 1, "block": {"ffn": {"kind": "dense", "hidden": 48}, **block}},
    }


BESIDE_EXPERTS = {"kind": "moe", "shared": {"kind": "product_key_memory"}}


@pytest.mark.parametrize(
    ("model", "tp", "says"),
    [
        (one_block(mixer={"kind": "attention", "heads": 6}), 4, "tp=4 does not divide heads=6"),
        (one_block(mixer={"kind": "attention", "heads": 6, "kv_heads": 3}), 2, "nor is divided by kv_heads=3"),
        (one_block(ffn={"kind": "gated", "hidden": 45}), 2, "tp=2 does not divide the ffn's hidden width of 45"),
        (one_block("encoder", mixer={"kind": "fourier"}), 2, "'fourier' has neither heads nor hidden units"),
        (one_block(ffn={"kind": "product_key_memory"}), 2, "'product_key_memory' has neither heads nor hidden"),
        (one_block(ffn=BESIDE_EXPERTS), 2, "'product_key_memory' has neither heads nor hidden"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_what_would_work(model: dict[str, Any], tp: int, says: str) -> None:
    found = refused(model, tp, mesh={"tp": tp})
    assert len(found) == 1, found
    assert says in found[0]
    assert "Take" in found[0]
    assert refused(model, tp) == []


def test_a_core_that_mixes_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the registry says of a core decides, so a plugin's is refused too."""
    entry = CORES.get("linear")
    monkeypatch.setitem(CORES._entries, "linear", replace(entry, traits=replace(entry.traits, per_head=False)))
    model = one_block(mixer={"kind": "attention", "heads": 4, "core": {"kind": "linear"}})
    found = refused(model, 2, mesh={"tp": 2})
    assert len(found) == 1
    assert "'linear' mixes heads" in found[0]
    assert "softmax" in found[0]
