"""Compiled blocks give the numbers of one process that compiles nothing: on the layouts, and in the catalogue.

The rows of the catalogue that change what a block is made of are traced, and differentiated ahead of time, by the
compiler's backend `aot_eager`, which runs the graphs by PyTorch's own operators. `INDUCTOR` are those of unusual
operators, which are compiled in full. The layouts are traced too, and in the nightly tests compiled in full.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.distributed import Pool
from tests.golden.shrink import ROOT, shrunk
from tests.parallel.against_one import Found, asked, compare, trained
from xscale.core.config import encode
from xscale.nn.blocks.block import Block
from xscale.recipe import read

pytestmark = pytest.mark.long


DROPOUT = 0.1


def model(depth: int, **block: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2}
    block = {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 48}, "dropout": DROPOUT, **block}
    return {"kind": "decoder", "width": 32, "stack": {"depth": depth, "block": block}}


MODELS = {
    "one": model(1),
    "two": model(2),
    "mixture": model(1, ffn={"kind": "moe", "experts": 4, "router": {"kind": "topk", "top_k": 2}}),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("two", {"mesh": {"pp": 2}}),
    "ring": ("one", {"mesh": {"cp": 2}, "context": {"style": "ring"}}),
    "zero3": ("one", {"zero": {"stage": 3}}),
    "recompute": ("one", {"zero": {"stage": 2}, "recompute": {"every": 1}}),
    "ep": ("mixture", {"mesh": {"ep": 2}}),
}
LISTS = [
    *("res-post-norm-001", "admin", "adanorm", "scaled-l2-norm", "powernorm", "batch-norm-transformer", "rezero"),
    *("t-fixup", "all-attention-persistent-memory", "drop-decoder-ffn", "transparent-attention"),
    *("weighted-transformer", "macaron", "sandwich-transformer", "evolved-transformer"),
]
"""Rows whose blocks are lists of sublayers, but for reversible-layers."""
MIXERS = [
    *("dynamic-lightweight-conv", "lite-transformer", "pretrained-convolutions", "mlp-mixer", "gmlp", "s4"),
    *("r-transformer", "delight", "quaternion-transformer", "scaling-transformers", "mamba2", "gated-delta-net"),
    *("gated-linear-attention", "rwkv7"),
]
DEPTH = [
    *("cross-layer-sharing", "albert", "act", "universal-transformer", "cct", "early-exit-general", "deebert"),
    *("pabee", "li-2021-token-early-exit", "sun-2021-ensemble-exit"),
]
INDUCTOR = ("s4",)


def compiled(*arguments: Any, **sections: Any) -> Found:
    """Trained with graphs of its own, and no more of them than blocks that differ.

    Past its limit of graphs torch computes as without compilation, and says so in a warning only.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    # The limit is one that the run raises.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        found = trained(*arguments, **sections)
    assert counters["stats"]["unique_graphs"] > 0
    return found


def traced(*arguments: Any, **sections: Any) -> Found:
    """`compiled` without the generation of code."""

    def trace(block: nn.Module, *, dynamic: bool, options: dict[str, bool]) -> None:
        nn.Module.compile(block, dynamic=dynamic, backend="aot_eager")

    with mock.patch.object(Block, "compile", trace):
        return compiled(*arguments, **sections)


def row(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The small model of a recipe of the catalogue, and its sections that a run of tests takes."""
    data: Any = encode(read(ROOT / f"configs/xformer/{name}.yaml", [])[0])
    kept = {key: data["data"][key] for key in ("cross_documents", "split_sentences")}
    sections = {"objective": data["objective"], "optimizer": data["optimizer"], "data": kept}
    return shrunk(data["model"]), sections


@pytest.fixture(scope="module")
def ones(pool: Pool) -> dict[str, Found]:
    return {name: pool.run(trained, 1, network, {}, steps=2)[0] for name, network in MODELS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "run", [pytest.param(compiled, marks=pytest.mark.nightly), traced], ids=lambda run: run.__name__
)
@pytest.mark.sampled(5)
def test_a_layout(run: Callable[..., Found], layout: str, ones: dict[str, Found], pool: Pool) -> None:
    name, parallel = LAYOUTS[layout]
    parallel = {**parallel, "compile": True}
    # The compiler takes minutes on a busy machine.
    compare(ones[name], pool.run(run, 2, MODELS[name], parallel, steps=2, timeout_seconds=1800.0))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [*LISTS, *MIXERS, *DEPTH])
def test_a_row_of_the_catalogue(name: str, pool: Pool) -> None:
    network, sections = row(name)
    (one,) = pool.run(trained, 1, network, {}, steps=1, **sections)
    run = compiled if name in INDUCTOR else traced
    compare(one, pool.run(run, 1, network, {"compile": True}, steps=1, **sections))


def test_reversible_blocks_are_refused() -> None:
    network, sections = row("reversible-layers")
    (problem,) = asked(network, {"compile": True}, **sections).check(1)
    assert problem.path == "parallel.compile"
    assert "recompute.reversible=false" in problem.advice
