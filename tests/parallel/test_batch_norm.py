"""Norms by statistics of a batch on layouts: the batch is that of all data- and context-parallel ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import DOUBLE
from tests.parallel.test_tensor import refused
from tests.train.test_layouts import one_rank, same
from xscale.core.errors import EXIT_DONE

MIXER = {"kind": "attention", "heads": 4}
BLOCK = {"mixer": MIXER, "ffn": {"kind": "dense", "hidden": 24}, "residual": "post"}


def encoder(norm: Any, **block: Any) -> dict[str, Any]:
    return {"kind": "encoder", "width": 32, "stack": {"depth": 2, "block": {**BLOCK, "norm": norm, **block}}}


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp": (2, 4, {"zero": {"stage": 0}}),
    "zero3": (2, 4, {"zero": {"stage": 3}}),
    "tp": (2, 8, {"mesh": {"tp": 2}}),
    "cp": (2, 8, {"mesh": {"cp": 2}}),
    "recompute": (2, 4, {"recompute": {"every": 1}}),
    "pp": (2, 8, {"mesh": {"pp": 2}}),
}
"""Ranks, sequences of a micro-batch on each, and the layout."""
LONG = ("dp", "tp", "pp")
"""Layouts of `make test-long`."""


@pytest.fixture(scope="module", params=["batch", "power"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> tuple[Path, str]:
    """A folder with the run of one process, whose batch is one micro-batch, and the norm."""
    folder = tmp_path_factory.mktemp(request.param)
    assert pool.run(one_rank, 1, folder, "one", **sections(request.param, 8)) == [EXIT_DONE]
    return folder, request.param


def sections(norm: str, micro_batch: int) -> dict[str, Any]:
    return {
        "model": encoder(norm),
        "objective": {"kind": "masked"},
        "precision": DOUBLE,
        "train": {"batch_size": 8, "micro_batch_size": micro_batch},
        # A rank of cp has 12 tokens, and the other one 11 and padding.
        "data": {"sequence_length": 23},
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in LAYOUTS]
)
@pytest.mark.sampled(3)
def test_a_run_has_the_numbers_of_one_process(name: str, one: tuple[Path, str], pool: Pool) -> None:
    """Losses, evaluations with running statistics, and everything in the checkpoint."""
    folder, norm = one
    ranks, micro_batch, layout = LAYOUTS[name]
    answers = pool.run(one_rank, ranks, folder, name, **sections(norm, micro_batch), parallel=layout)
    assert answers == [EXIT_DONE] * ranks
    same(folder, name, "one", 1e-9)


def test_power_is_the_same_for_other_micro_batches(tmp_path: Path, pool: Pool) -> None:
    for name, micro_batch in (("one", 8), ("two", 2)):
        pool.run(one_rank, 1, tmp_path, name, **sections("power", micro_batch))
    same(tmp_path, "two", "one", 1e-9)


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_sequence_parallelism_is_refused(norm: str) -> None:
    (problem,) = refused(encoder(norm), 2, mesh={"tp": 2}, tensor={"sequence": True})
    assert f"norm '{norm}' reads all tokens of the batch" in problem
    assert "norm.kind=layer, rms, ada or scale" in problem


def test_batch_norm_in_a_causal_model_is_refused() -> None:
    decoder = {**encoder("batch"), "kind": "decoder"}
    (problem,) = refused(decoder, 1)
    assert problem.startswith("model.stack.block.norm: 'batch' normalises by all tokens of the batch in training")
    assert "Take model.stack.block.norm.kind=layer, rms, ada, power or scale. Or take an encoder." in problem
    assert refused({**encoder("power"), "kind": "decoder"}, 1) == []


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_the_norm_of_an_exit_is_refused(norm: str) -> None:
    model = encoder(norm)
    model["stack"]["exits"] = {}
    (problem,) = refused(model, 1)
    assert problem.startswith(f"model.stack.exits.norm: '{norm}' collects statistics in every step")
    model["stack"]["exits"] = {"norm": False}
    assert refused(model, 1) == []


def test_groups_divide_the_width() -> None:
    (problem,) = refused(encoder({"kind": "power", "groups": 5}), 1)
    assert problem.startswith("model.stack.block.norm.groups: groups=5 does not divide width=32")


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_a_norm_of_heads_is_refused(norm: str) -> None:
    (problem,) = refused(encoder("layer", mixer={**MIXER, "qk_norm": norm}), 1)
    says = f"model.stack.block.mixer.qk_norm: '{norm}' has statistics of the tokens between sublayers"
    assert problem.startswith(says)
