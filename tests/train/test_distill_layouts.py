"""Students and teachers on layouts of their own learn what one process does, in float64."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.distributed import Pool
from tests.train.test_distill import ALL, FOUR_DEEP, OUTER, last, model, student
from tests.train.tiny import metrics
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE
from xscale.nn.blocks.block import Block

SOFT = {"temperature": 3.0}
SEQUENCE_ALONE = {"tensor": {"sequence": True}}
SEQUENCE = {"mesh": {"tp": 2}, **SEQUENCE_ALONE}
STATES = {key: value for key, value in ALL.items() if key != "attention_weight"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, ALL, {}),
    "zero3": (2, {"zero": {"stage": 3}}, ALL, {}),
    "teacher_zero3": (2, {"zero": {"stage": 1}}, ALL, {"zero": 3}),
    "tp2": (2, {"mesh": {"tp": 2}}, ALL, {}),
    "tp2_teacher_tp1": (2, {"mesh": {"tp": 2}}, OUTER, {"tp": 1}),
    "tp2_teacher_zero3": (2, {"mesh": {"tp": 2}}, OUTER, {"tp": 1, "zero": 3}),
    "tp2_all": (2, {"mesh": {"tp": 2}}, {**SOFT, "soft_over": "all"}, {}),
    "tp2_sequence": (2, SEQUENCE, SOFT, {}),
    "pp2": (2, {"mesh": {"pp": 2}}, OUTER, {}),
    "cp2": (2, {"mesh": {"cp": 2}}, STATES, {}),
    "cp3_all": (3, {"mesh": {"cp": 3}, "zero": {"stage": 3}}, {**STATES, "soft_over": "all"}, {"zero": 3}),
    "cp2_tp2": (4, {"mesh": {"cp": 2, "tp": 2}}, STATES, {"tp": 1}),
    "recompute": (1, {"recompute": {"every": 1}}, ALL, {}),
    "tp2_dp2": (4, {"mesh": {"tp": 2}, "zero": {"stage": 3}}, ALL, {"zero": 3}),
    "init_tp2": (2, {"mesh": {"tp": 2}}, {**ALL, "init_from_teacher": True}, {"zero": 3}),
    "init_pp2": (2, {"mesh": {"pp": 2}}, {**OUTER, "init_from_teacher": True}, {}),
    "teacher_tp2": (2, {}, ALL, {"tp": 2}),
    "teacher_tp2_zero3": (4, {"zero": {"stage": 2}}, ALL, {"tp": 2, "zero": 3}),
    "tp2_teacher_tp4": (4, {"mesh": {"tp": 2}}, ALL, {"tp": 4}),
    "tp2_teacher_tp1_scores": (2, {"mesh": {"tp": 2}}, ALL, {"tp": 1}),
    "tp_outside": (4, {"mesh": {"tp": 2, "order": ["pp", "tp", "dp_replicate", "dp_shard", "cp"]}}, ALL, {}),
    "cp2_teacher_tp2": (2, {"mesh": {"cp": 2}}, ALL, {"tp": 2}),
    "cp2_scores": (2, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}, ALL, {}),
    "cp3_scores": (3, {"mesh": {"cp": 3}, "context": {"style": "ring"}}, ALL, {}),
    "pp2_inner": (2, {"mesh": {"pp": 2}}, ALL, {}),
    "pp2_maps": (2, {"mesh": {"pp": 2}}, {**ALL, "map_width": 32}, {}),
    "pp2_two_stages": (2, {"mesh": {"pp": 2}}, {**ALL, "map_width": 32, "inner_until": 0.5}, {}),
    "pp2_tp2_teacher_zero3": (4, {"mesh": {"pp": 2, "tp": 2}}, ALL, {"tp": 1, "zero": 3}),
    "pp2_dp2_teacher_tp2": (4, {"mesh": {"pp": 2}}, {**ALL, "soft_over": "all"}, {"tp": 2}),
    "pp2_cp2": (4, {"mesh": {"pp": 2, "cp": 2}}, ALL, {}),
    "tp2_sequence_inner": (2, SEQUENCE, {**ALL, "map_width": 32}, {}),
    "pp2_tp2_sequence": (4, {"mesh": {"pp": 2, "tp": 2}, **SEQUENCE_ALONE}, ALL, {}),
    "cp2_tp2_sequence": (4, {"mesh": {"cp": 2, "tp": 2}, **SEQUENCE_ALONE}, ALL, {"tp": 1}),
}


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_learn_as_one_process_does(tmp_path: Path, pool: Pool, name: str) -> None:
    ranks, parallel, distill, own = LAYOUTS[name]
    learns_as_one_process(tmp_path, pool, ranks, parallel, distill, own)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "zbv"},
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        {"schedule": "dualpipe_v"},
    ],
    ids=lambda pipeline: str(pipeline["schedule"]),
)
def test_several_stages_of_a_rank_learn_as_one_process_does(
    tmp_path: Path, pool: Pool, pipeline: dict[str, Any]
) -> None:
    """Each runs the teacher up to the blocks that its own learn from; zbv and dualpipe_v split the backward."""
    parallel = {"mesh": {"pp": 2}, "pipeline": pipeline}
    learns_as_one_process(tmp_path, pool, 2, parallel, ALL, {}, model=model(4, tied=False))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("position", ["alibi", "relative", "transformer_xl", "deberta"])
def test_biased_scores_of_shards_learn_as_one_process_does(tmp_path: Path, pool: Pool, position: str) -> None:
    parallel = {"mesh": {"cp": 2, "tp": 2}}
    learns_as_one_process(tmp_path, pool, 4, parallel, ALL, {"tp": 1}, model=model(position=position))


GLOBAL_LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "cp2": (2, {"mesh": {"cp": 2}, "context": {"style": "ulysses"}}, 0),
    "cp3": (3, {"mesh": {"cp": 3}, "context": {"style": "ring"}, "zero": {"stage": 3}}, 2),
    "cp2_tp2_sequence": (4, {"mesh": {"cp": 2, "tp": 2}, **SEQUENCE_ALONE}, 5),
    "pp2": (2, {"mesh": {"pp": 2}}, 2),
    "tp2_sequence": (2, SEQUENCE, 0),
}


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GLOBAL_LAYOUTS)
def test_students_with_global_tokens_learn_as_one_process_does(tmp_path: Path, pool: Pool, name: str) -> None:
    """The teacher has none, fewer than the student's 5, or as many."""
    ranks, parallel, count = GLOBAL_LAYOUTS[name]
    encoder = {**model(), "kind": "encoder", "global_tokens": 5}
    distill = {**ALL, "soft_over": "all", "train_teacher": {**FOUR_DEEP, "model": {**FOUR_DEEP["model"]}}}
    distill["train_teacher"]["model"]["global_tokens"] = count
    sections = {"objective": {"kind": "masked"}, "data": {"cross_documents": True}}
    learns_as_one_process(tmp_path, pool, ranks, parallel, distill, {}, model=encoder, **sections)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"mesh": {"cp": 2}}), (4, {"mesh": {"pp": 2, "tp": 2}, **SEQUENCE_ALONE})],
    ids=["cp2", "pp2_tp2_sequence"],
)
def test_multi_token_prediction_learns_as_one_process_does(
    tmp_path: Path, pool: Pool, ranks: int, parallel: dict[str, Any]
) -> None:
    """The modules are those of the student alone."""
    distill = {**ALL, "train_teacher": {**FOUR_DEEP, "model": {**FOUR_DEEP["model"], "mtp": None}}}
    learns_as_one_process(tmp_path, pool, ranks, parallel, distill, {}, model=model(mtp={"depth": 2}))


@pytest.mark.long
@pytest.mark.parametrize("recompute", [0, 1])
def test_compiled_blocks_learn_as_others_do(tmp_path: Path, pool: Pool, recompute: int) -> None:
    """The losses of attention scores are outside of the graphs, which are not made anew in each forward."""
    distill = {**ALL, "map_width": 32}
    assert pool.run(student, 1, tmp_path, "single", distill) == [EXIT_DONE]
    parallel = {"compile": True, "recompute": {"every": recompute}}
    graphs = pool.run(graphs_of_student, 1, tmp_path, "compiled", distill, parallel=parallel, timeout_seconds=1800.0)
    assert 0 < graphs[0] <= 24, "as many for any number of steps"
    equal_numbers(tmp_path, "compiled")


def graphs_of_student(folder: Path, name: str, distill: dict[str, Any], **sections: Any) -> int:
    """Train a student whose blocks are traced by the compiler; return the number of its graphs."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    def trace(block: nn.Module, *, dynamic: bool, options: dict[str, bool]) -> None:
        nn.Module.compile(block, dynamic=dynamic, backend="aot_eager")

    torch._dynamo.reset()
    counters.clear()
    with (
        mock.patch.object(Block, "compile", trace),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8),
    ):
        assert student(folder, name, distill, **sections) == EXIT_DONE
    return int(counters["stats"]["unique_graphs"])


def learns_as_one_process(
    tmp_path: Path,
    pool: Pool,
    ranks: int,
    parallel: dict[str, Any],
    distill: dict[str, Any],
    own: dict[str, Any],
    **sections: Any,
) -> None:
    """Compare losses, gradients and weights of a student on some ranks with those on one, in float64.

    `own`: what the distillation is on the ranks alone.
    """
    name = "ranks"
    assert pool.run(student, 1, tmp_path, "single", distill, **sections) == [EXIT_DONE]
    given = {"parallel": parallel, **sections}
    assert pool.run(student, ranks, tmp_path, name, {**distill, **own}, **given) == [EXIT_DONE] * ranks
    equal_numbers(tmp_path, name)


def equal_numbers(tmp_path: Path, name: str) -> None:
    """Compare losses, gradients and weights of a run with those of the run "single"."""
    single, lines = metrics(tmp_path, "single"), metrics(tmp_path, name)
    for line, other in zip(lines, single, strict=True):
        for key in other:
            if key in ("loss", "grad_norm", "eval_loss") or key.startswith("distillation/"):
                assert math.isclose(line[key], other[key], rel_tol=1e-9), (key, line["step"])
    ours, theirs = load_tensors(last(tmp_path, name)), load_tensors(last(tmp_path, "single"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (ours[key] - value).abs().max() < 1e-9, key
