"""Reversible blocks: the gradients of saved activations, the numbers of one process, and memory that does not grow."""

from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, alone, asked, batch_of, same
from tests.parallel.test_tensor import refused
from xscale.measure.op_tracer import OpTracer
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import Mesh
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.reversible import FreedTensor
from xscale.settings.settings import build_on_meta

ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "dropout": 0.1}
FFN: dict[str, Any] = {"kind": "gated", "hidden": 48}
MOE = {"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}, "expert": FFN}
SAVED = {"recompute": {"reversible": False}}


def decoder(residual: Any = "reversible", depth: int = 3, **block: Any) -> dict[str, Any]:
    parts = {"mixer": ATTENTION, "ffn": FFN, "dropout": 0.1, "residual": residual, **block}
    return {"kind": "decoder", "width": 32, "stack": {"depth": depth, "block": parts}}


STACK = {"depth": 2, "block": {"mixer": ATTENTION, "ffn": FFN, "dropout": 0.1, "residual": "reversible"}}
PAIR = {"kind": "encoder_decoder", "width": 32, "encoder": STACK, "decoder": STACK}
NOISELESS = {**ATTENTION, "dropout": 0.0}
MODELS = {
    "dense": decoder(),
    "moe": decoder(ffn=MOE),
    "macaron": decoder(sublayers=({"part": "ffn", "factor": 0.5}, {"part": "mixer"}, {"part": "ffn", "factor": 0.5})),
    "res_post": decoder(residual={"kind": "reversible", "placement": "res_post"}),
    "shared": {**decoder(), "stack": {**decoder()["stack"], "share": "all"}},
    "pair": PAIR,
}


@pytest.mark.parametrize("name", MODELS)
def test_reconstructed_inputs_give_the_gradients_of_saved_ones(name: str, pool: Pool) -> None:
    """With dropout: the recomputation draws what the forward drew."""
    model = MODELS[name]
    same(pool, alone(pool, model, steps=2), 1, model, SAVED, steps=2)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"mesh": {"tp": 2}}),
    "tp-sequence": (2, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}),
    "zero2": (2, {"zero": {"stage": 2}}),
    "zero3": (2, {"zero": {"stage": 3}}),
    "zero3-prefetch": (2, {"zero": {"stage": 3, "prefetch": 1}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(3)
def test_a_layout_has_the_numbers_of_one_process(name: str, pool: Pool) -> None:
    ranks, layout = LAYOUTS[name]
    model = decoder(mixer=NOISELESS if name == "cp" else ATTENTION)
    same(pool, alone(pool, model), ranks, model, layout)


@pytest.mark.long
def test_together(pool: Pool) -> None:
    model = decoder(depth=4, ffn=MOE)
    expected = alone(pool, model)
    same(pool, expected, 4, model, {"mesh": {"tp": 2, "pp": 2}, "tensor": {"sequence": True}, "zero": {"stage": 1}})
    interleaved = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    same(pool, expected, 4, model, {"mesh": {"pp": 2, "ep": 2}, "pipeline": interleaved, "zero": {"stage": 3}})


def step(depth: int, parallel: dict[str, Any], compute: str = "float32") -> tuple[int, int, torch.Tensor]:
    """Bytes that a forward saves, the most in a step, both without parameters, and the embedding's gradient [V, D]."""
    settings = asked(decoder(depth=depth), parallel, precision={"compute": compute, "master": "float32"})
    network = build_on_meta(settings, 67)
    mesh = Mesh(RankInfo(0, 1), Degrees(), torch.device("cpu"))
    network = ParallelPlan(settings.parallel, settings.precision, LENGTH).apply(network, mesh, SEED)
    network.train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    batch = batch_of(objective, 8, 0, 0, Stats(), not settings.data.cross_documents)
    table = network.get_parameter("embed.table.weight")
    network.requires_grad_(requires_grad=False)
    table.requires_grad_()
    tracer = OpTracer()
    with tracer, tracer.watching_resizes("activations"):
        with tracer.labelled(kind="parameters"):
            parameters = [parameter.view_as(parameter) for parameter in network.parameters()]
        loss = objective.loss(network, batch)
        saved = tracer.total
        loss.backward()
    assert table.grad is not None
    fixed = sum(parameter.nbytes for parameter in parameters)
    return saved - fixed, tracer.peak.total - fixed, table.grad


def test_the_memory_of_activations_does_not_grow_with_the_depth() -> None:
    """Kitaev et al. 2020, section 3: activations independent of the number of layers."""
    shallow, deep = step(6, {}), step(24, {})
    assert deep[0] <= 1.05 * shallow[0]
    assert deep[1] <= 1.05 * shallow[1]
    saved = [step(depth, SAVED)[0] for depth in (6, 24)]
    assert saved[1] > 2.5 * saved[0], "negative control: saved activations grow"


def test_half_precision_reconstructs_streams_in_float32() -> None:
    found, expected = (step(24, parallel, "bfloat16")[2] for parallel in ({}, SAVED))
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_a_freed_tensor_comes_back() -> None:
    x, added = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    before, freed = x.clone(), FreedTensor(x)
    freed.restore(added)
    assert torch.equal(x, before), "nothing was freed yet"
    freed.free(x + added)
    assert x.untyped_storage().nbytes() == 0
    freed.restore(added)
    torch.testing.assert_close(x, before)


@pytest.mark.parametrize(
    ("parallel", "ranks", "says"),
    [
        (
            {"recompute": {"every": 1}},
            1,
            "parallel.recompute.every: reversible blocks recompute their sublayers",
        ),
        ({"compile": True}, 1, "parallel.compile: the inputs of reversible blocks are freed"),
        (
            {
                "mesh": {"tp": 2},
                "tensor": {"sequence": True},
                "recompute": {"regather_sequence_parallel_input": True},
            },
            2,
            "parallel.recompute.regather_sequence_parallel_input: reversible blocks save no gathered activations",
        ),
        (
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
            2,
            "parallel.pipeline.schedule: 'zero_bubble' splits the backward",
        ),
    ],
)
def test_what_saves_or_splits_is_refused(parallel: dict[str, Any], ranks: int, says: str) -> None:
    (problem,) = refused(decoder(depth=2), ranks, **parallel)
    assert problem.startswith(says)
    assert "parallel.recompute.reversible=false" in problem
    parallel = {**parallel, "recompute": {**parallel.get("recompute", {}), "reversible": False}}
    assert refused(decoder(depth=2), ranks, **parallel) == []
