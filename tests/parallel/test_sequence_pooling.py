"""Encoders that shorten their sequence, on layouts that shard heads, parameters and samples."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import DOUBLE, alone, asked, same
from tests.train.test_layouts import one_rank
from tests.train.test_layouts import same as same_run
from xscale.core.errors import EXIT_DONE

BLOCK = {
    "mixer": {"kind": "attention", "heads": 4, "bias": True},
    "ffn": {"kind": "dense", "hidden": 48},
    "norm": "layer",
    "residual": "post",
}


def model(pooling: dict[str, Any], dropout: float = 0.1, **changes: Any) -> dict[str, Any]:
    stack = {"depth": 4, "block": {**BLOCK, "dropout": dropout}, "pooling": pooling}
    return {"kind": "encoder", "width": 32, "stack": stack, **changes}


FUNNEL = model({"before": [1, 2], "decoder_blocks": 1}, position="transformer_xl")
PLAIN = model({"before": [1, 2]}, position="learned")
LABELLED = {"kind": "labelled", "paths": ["a.jsonl"], "labels": "class"}
DISTILL = {"before": [1], "method": "distill", "separate_first": False, "queries_only": False, "decoder_blocks": 2}
DISTILLED = model(DISTILL, position="learned")
RUN: dict[str, Any] = {"steps": 2, "data": {"cross_documents": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "recompute": {"every": 1}},
    "zero": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    "dp": {"mesh": {"dp_replicate": 2}},
    "cp": {"mesh": {"cp": 2}},
}


def test_heads_over_tp_have_the_numbers_of_one_process(pool: Pool) -> None:
    same(pool, alone(pool, FUNNEL, **RUN), 2, FUNNEL, LAYOUTS["tp"], **RUN)


CONTEXT = {
    style: {"mesh": {"cp": 2}, "recompute": {"every": 1}, "context": {"style": style}} for style in ("ring", "ulysses")
}


@pytest.mark.parametrize("style", ["ulysses", pytest.param("ring", marks=pytest.mark.long)])
def test_windows_of_two_ranks_have_the_numbers_of_one_process(style: str, pool: Pool) -> None:
    """23 tokens in four chunks of six: windows of two tokens, after the first, lie across ranks."""
    model = {**FUNNEL, "position": "learned"}
    same(pool, alone(pool, model, **RUN), 2, model, CONTEXT[style], **RUN)


@pytest.mark.long
@pytest.mark.parametrize("section", [FUNNEL, DISTILLED], ids=["funnel", "distilled"])
def test_layouts_have_the_numbers_of_one_process(section: dict[str, Any], pool: Pool) -> None:
    expected = alone(pool, section, **RUN)
    for name, layout in LAYOUTS.items():
        if name != "cp" or section is not FUNNEL:
            same(pool, expected, 2, section, layout, **RUN)


@pytest.mark.long
def test_sequences_are_classified_by_windows(pool: Pool) -> None:
    sections = {"objective": {"kind": "classify", "pool": "last"}, "data": {"source": LABELLED}, "steps": 2}
    expected = alone(pool, PLAIN, **sections)
    for layout in LAYOUTS.values():
        same(pool, expected, 2, PLAIN, layout, **sections)


@pytest.mark.parametrize(
    ("section", "data", "message"),
    [
        ("PLAIN", {"cross_documents": True}, "pooling.decoder_blocks: the objective predicts at every token"),
        ("FUNNEL", {}, "data.cross_documents: the windows of model.stack.pooling begin at every second token"),
    ],
)
def test_objectives_on_tokens_need_a_decoder_and_documents_that_see_each_other(
    section: str, data: dict[str, Any], message: str
) -> None:
    (problem,) = asked({"PLAIN": PLAIN, "FUNNEL": FUNNEL}[section], {}, data=data).check(1)
    assert str(problem).count(message) == 1


@pytest.mark.long
def test_batch_norms_of_distilling_read_the_batch_of_all_ranks(tmp_path: Path, pool: Pool) -> None:
    section = model({**DISTILL, "norm": "batch"}, dropout=0.0)
    for name, ranks, layout in (("one", 1, {}), ("zero", 2, {"zero": {"stage": 3}}), ("tp", 2, LAYOUTS["tp"])):
        train = {"batch_size": 8, "micro_batch_size": 4 if name == "zero" else 8}
        sections = {"model": section, "objective": {"kind": "masked"}, "precision": DOUBLE, "train": train}
        data = {"sequence_length": 23, "cross_documents": True}
        answers = pool.run(one_rank, ranks, tmp_path, name, **sections, data=data, parallel=layout)
        assert answers == [EXIT_DONE] * ranks
        same_run(tmp_path, name, "one", 1e-9)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"mesh": {"pp": 2}}, "a stage would receive hidden states of another length"),
        ({"mesh": {"cp": 2}}, "differences of indices, which are no distances of windows"),
        ({"mesh": {"tp": 2}, "tensor": {"sequence": True}}, "stack.pooling reads the tokens between the blocks"),
    ],
)
def test_layouts_that_shard_the_depth_or_the_sequence_between_regions_are_refused(
    layout: dict[str, Any], message: str
) -> None:
    problems = asked(FUNNEL, layout, data=RUN["data"]).check(2)
    assert [problem for problem in problems if message in str(problem)], [str(problem) for problem in problems]


def test_a_batch_norm_of_distilling_is_refused_on_shards() -> None:
    problems = asked(model({**DISTILL, "norm": "batch"}, dropout=0.0), {"mesh": {"cp": 2}}, data=RUN["data"]).check(2)
    assert [problem for problem in problems if "once for each rank" in str(problem)]
