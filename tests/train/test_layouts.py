"""Every layout gives the numbers of one process: losses, gradients' norms, evaluations and final weights."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.train.tiny import MIXTURE, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE

pytestmark = pytest.mark.long


DOUBLE = {"compute": "float64", "master": "float64"}
LAYOUTS = {
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
    "zero1-ep2": {"zero": {"stage": 1}, "mesh": {"ep": 2}},
    "zero3-ep2": {"zero": {"stage": 3}, "mesh": {"ep": 2}},
    "zero0-ep2": {"zero": {"stage": 0}, "mesh": {"ep": 2}},
    "zero2-recompute": {"zero": {"stage": 2}, "recompute": {"every": 1}},
}


def one_rank(folder: Path, name: str, **sections: Any) -> int:
    """A run by the worker's own rank."""
    return run(recipe(folder, name, **sections))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """The folder of the runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert pool.run(one_rank, 1, folder, "double", precision=DOUBLE) == [EXIT_DONE]
    assert pool.run(one_rank, 1, folder, "single") == [EXIT_DONE]
    return folder


def same(folder: Path, ours: str, theirs: str, tolerance: float) -> None:
    """All numbers of two runs agree to `tolerance`, relatively."""
    mine, other = metrics(folder, ours), metrics(folder, theirs)
    assert len(mine) == len(other) > 0
    for line, expected in zip(mine, other, strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "bits_per_byte", "tokens"):
            assert (key in line) == (key in expected)
            if key in line:
                assert math.isclose(line[key], expected[key], rel_tol=tolerance), (key, line, expected)
    tensors, wanted = (load_tensors(folder / name / "checkpoints" / "step-00000006") for name in (ours, theirs))
    assert tensors.keys() == wanted.keys()
    for name, value in tensors.items():
        difference = (value - wanted[name]).abs().max().item()
        assert difference <= tolerance * max(1.0, wanted[name].abs().max().item()), (name, difference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_in_float64(layout: str, alone: Path, pool: Pool) -> None:
    name = f"double-{layout}"
    answers = pool.run(one_rank, 2, alone, name, precision=DOUBLE, parallel=LAYOUTS[layout])
    assert answers == [EXIT_DONE, EXIT_DONE]
    same(alone, name, "double", 1e-9)


def test_two_ranks_equal_one_in_float32_to_rounding(alone: Path, pool: Pool) -> None:
    pool.run(one_rank, 2, alone, "single-ep2", parallel=LAYOUTS["zero1-ep2"])
    mine = [line["loss"] for line in metrics(alone, "single-ep2") if "loss" in line]
    theirs = [line["loss"] for line in metrics(alone, "single") if "loss" in line]
    assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5)


def test_a_balancing_bias_follows_the_load_of_all_ranks(alone: Path, pool: Pool) -> None:
    """The bias moves between steps by the load over the whole step, and is saved; a router keeps its precision."""
    model = balanced()
    for name, compute in (("bias", DOUBLE), ("half", {"compute": "bfloat16", "master": "float32"})):
        pool.run(one_rank, 1, alone, name, precision=compute, model=model, checkpoint={"every_steps": 3})
        pool.run(one_rank, 2, alone, f"{name}-2", precision=compute, model=model, parallel=LAYOUTS["zero1-ep2"])
        same(alone, f"{name}-2", name, 1e-9 if name == "bias" else 2e-2)
    # After an odd number of equal moves up or down a bias cannot be back at zero, as it can be after the last step.
    bias = load_tensors(alone / "bias" / "checkpoints" / "step-00000003")["model.stack.blocks.1.ffn.part.router.bias"]
    assert bias.abs().max() > 0


def test_the_global_batch_is_balanced_alike_on_every_layout(alone: Path, pool: Pool) -> None:
    """Loads over all ranks and micro-batches; and a run that leaves and goes on has kept them."""
    model = routed({"kind": "topk", "balance_over": "global_batch", "aux_loss_weight": 0.5})
    pool.run(one_rank, 1, alone, "global", precision=DOUBLE, model=model)
    for layout in ("zero1-ep2", "zero3"):
        pool.run(one_rank, 2, alone, f"global-{layout}", precision=DOUBLE, model=model, parallel=LAYOUTS[layout])
        same(alone, f"global-{layout}", "global", 1e-9)
    for _ in range(2):
        pool.run(one_rank, 1, alone, "global-on", precision=DOUBLE, model=model, train={"stop_after": 3})
    same(alone, "global-on", "global", 0.0)
    pool.run(one_rank, 1, alone, "micro", precision=DOUBLE, model=routed({"kind": "topk", "aux_loss_weight": 0.5}))
    with pytest.raises(AssertionError):
        same(alone, "micro", "global", 1e-9)


def balanced() -> dict[str, Any]:
    """The tiny model with a loss-free balanced router."""
    return routed({"kind": "topk", "top_k": 2, "score": "sigmoid", "bias_update_rate": 0.01, "aux_loss_weight": 0.0})


def routed(router: dict[str, Any]) -> dict[str, Any]:
    """The tiny model with this router."""
    model = copy.deepcopy(MIXTURE)
    rule: Any = model["stack"]["rules"][0]  # type: ignore[index]
    rule["ffn"]["router"] = router
    return model


@pytest.mark.slow
def test_four_ranks_fold_experts_over_two_copies(alone: Path, pool: Pool) -> None:
    for name, layout in {
        "hybrid": {"zero": {"stage": 3}, "mesh": {"dp_replicate": 2, "ep": 2}},
        "folded": {"zero": {"stage": 3}, "mesh": {"ep": 2}},
        "spread": {"zero": {"stage": 1}, "mesh": {"ep": 4}},
    }.items():
        pool.run(one_rank, 4, alone, name, precision=DOUBLE, parallel=layout)
        same(alone, name, "double", 1e-9)


def test_the_comparison_fails_when_a_rank_reads_other_samples(alone: Path, pool: Pool) -> None:
    """Negative control: another order of the data must not pass for the same run."""
    pool.run(one_rank, 1, alone, "other", precision=DOUBLE, run={"seed": 4})
    with pytest.raises(AssertionError):
        same(alone, "other", "double", 1e-9)


def test_the_model_of_the_comparison_has_what_it_compares() -> None:
    """Experts, dropout, router noise, block-sparse attention and grouped heads are all in the tiny model."""
    stack: Any = MIXTURE["stack"]
    assert stack["block"]["dropout"] > 0
    assert stack["rules"][0]["ffn"]["router"]["jitter"] > 0
