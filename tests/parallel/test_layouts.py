"""Layouts made from the axes give the numbers of one process: start, losses, gradients, weights after two steps."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from tests.distributed import Pool
from tests.families import family
from tests.parallel.against_one import Found, alone, compare, same, trained
from tests.parallel.cases import AXES, HABITS, OPTIONS, Case, cases, every_pair, plain_or_changed, wanted
from tests.parallel.models import DENSE, MODELS, SHALLOW, changed
from xscale_kernels.grouped_gemm.blocks import rows_bitwise_independent

Reference = Callable[[Case], Found]


@pytest.fixture(scope="module")
def one(pool: Pool) -> Reference:
    """The run of one process that a case is compared with; each is made once."""
    known: dict[object, Found] = {}

    def reference(case: Case) -> Found:
        key = (case.model, case.deep, case.tied, case.clip, case.micro)
        if key not in known:
            known[key] = alone(pool, case.network, **case.sections)
        return known[key]

    return reference


QUICK = (
    "1f1b tp ep zero1",
    "sequence ring zero3",
    "zero_bubble ring ep zero2",
    "copies sequence ep zero3",
)
"""Larger layouts of `make test`; the others are part of `make test-long`."""


def is_quick(model: str, options: tuple[str, ...]) -> bool:
    """Whether `make test` tries it: each option by itself, and a few layouts that join most axes."""
    return model == "mixture" and (len(options) == 1 or " ".join(options) in QUICK)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(
            model,
            options,
            id="-".join((model, *options)),
            marks=[pytest.mark.sampled(2)] if is_quick(model, options) else [pytest.mark.long, pytest.mark.sampled(6)],
        )
        for model in MODELS
        for options in wanted(model)
    ],
)
def test_a_layout(model: str, options: tuple[str, ...], one: Reference, pool: Pool) -> None:
    case = plain_or_changed(model, options)
    if case is None:
        assert all("Take" in problem for problem in Case(model, options, tied=False).problems())
    else:
        same(pool, one(case), case.ranks, case.network, case.parallel, **case.sections)


@pytest.mark.parametrize(
    ("position", "schedule"),
    [
        pytest.param(
            entry.name,
            schedule,
            marks=[]
            if (entry.name, schedule) == ("relative", "interleaved_1f1b")
            else [pytest.mark.long, pytest.mark.sampled(5)],
        )
        for entry in family("position")
        for schedule in AXES["pp"]
    ],
)
def test_a_position_on_a_schedule(position: str, schedule: str, pool: Pool) -> None:
    """Blocks share what they compute from positions, and two stages of a rank may share no graph with it."""
    network = changed(DENSE, position__kind=position, tied=False)
    case = Case("dense", (schedule,))
    same(pool, alone(pool, network, steps=2), case.ranks, network, case.parallel, steps=2)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [("tp", "zero3"), ("sequence",), ("ulysses",)], ids="-".join)
@pytest.mark.parametrize("position", [entry.name for entry in family("position")])
def test_a_position_on_heads_and_tokens_that_are_cut(position: str, options: tuple[str, ...], pool: Pool) -> None:
    """A rank has some of the heads' biases, and tokens that do not begin at position 0."""
    network = changed(DENSE, position__kind=position, tied=False)
    case = Case("dense", options)
    same(pool, alone(pool, network, steps=1), case.ranks, network, case.parallel, steps=1)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [("1f1b", "tp"), ("sequence",), ("ulysses", "zero3")], ids="-".join)
@pytest.mark.parametrize(
    "position",
    [
        {"kind": "relative"},
        {"kind": "tupe"},
        {"kind": "deberta", "buckets": 8, "distance": 16, "norm": {"kind": "layer"}},
    ],
    ids=lambda position: position["kind"],
)
def test_a_position_that_all_blocks_share(position: dict[str, object], options: tuple[str, ...], pool: Pool) -> None:
    """Each stage has a copy, and each rank of tp a part of the gradient of what heads have in common."""
    network = changed(DENSE, position={**position, "shared": True}, tied=False)
    case = Case("dense", options)
    same(pool, alone(pool, network, steps=1), case.ranks, network, case.parallel, steps=1)


@pytest.mark.long
def test_all_five_axes_at_once(one: Reference, pool: Pool) -> None:
    """pp 2 x dp 2 x cp 2 x tp 2 with experts over dp x cp: sixteen ranks."""
    case = Case("mixture", ("1f1b", "zero2", "ulysses", "sequence", "ep"))
    parallel = {**case.parallel, "mesh": {**case.parallel["mesh"], "ep": 4}}
    assert case.ranks == 16
    compare(one(case), pool.run(trained, 16, case.network, parallel, **case.sections))


@pytest.mark.parametrize(
    "expert", [{"kind": "gated", "hidden": 64}, {"kind": "dense", "hidden": 64, "bias": True}], ids=["gated", "dense"]
)
@pytest.mark.parametrize("options", [pytest.param(("tp",), marks=pytest.mark.long), ("sequence", "ep")], ids="-".join)
def test_whole_experts_in_one_operator(expert: dict[str, object], options: tuple[str, ...], pool: Pool) -> None:
    """Width that the operators of whole experts want, cut in two by tp, and computed twice."""
    assert rows_bitwise_independent(torch.zeros(1, 32), torch.zeros(4, 64 // 2, 32)), (
        "the widths of the cut experts do not suit"
    )
    network = changed(SHALLOW["mixture"], stack__rules__0__ffn__expert=expert)
    case = Case("mixture", options, recompute=1)
    same(pool, alone(pool, network, **case.sections), case.ranks, network, case.parallel, **case.sections)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        pytest.param(("1f1b", "sequence"), ("tp", "cp", "dp_shard", "dp_replicate", "pp"), marks=pytest.mark.long),
        pytest.param(
            ("ulysses", "zero3", "ep"), ("cp", "pp", "dp_replicate", "tp", "dp_shard"), marks=pytest.mark.long
        ),
        (("copies", "tp", "ep"), ("dp_shard", "tp", "dp_replicate", "cp", "pp")),
    ],
    ids=["pp-neighbours", "dp-neighbours", "copies-inside"],
)
def test_another_order_of_ranks(options: tuple[str, ...], order: tuple[str, ...], one: Reference, pool: Pool) -> None:
    case = Case("mixture", options)
    parallel = {**case.parallel, "mesh": {**case.parallel["mesh"], "order": order}}
    compare(one(case), pool.run(trained, case.ranks, case.network, parallel, **case.sections))


@pytest.mark.long
def test_every_option_alone_is_tried_with_every_model() -> None:
    there = {(case.model, case.options) for case in cases()}
    for model in MODELS:
        for option, axis in OPTIONS.items():
            if axis != "ep" or model == "mixture":
                assert (model, (option,)) in there, (model, option)


@pytest.mark.long
def test_every_pair_is_tried_or_refused() -> None:
    """Each pair of options with a model, each pair of axes with every model."""
    there = {frozenset(pair) for case in cases() for pair in combinations(case.options, 2)}
    for pair in every_pair():
        if frozenset(pair) not in there:
            assert all(plain_or_changed(model, pair) is None for model in MODELS), pair
            assert any("Take" in problem for problem in Case("mixture", pair, tied=False).problems())
    axes = {
        (case.model, frozenset(OPTIONS[option] for option in pair))
        for case in cases()
        for pair in combinations(case.options, 2)
    }
    for model in MODELS:
        for pair in combinations(AXES if model == "mixture" else [axis for axis in AXES if axis != "ep"], 2):
            assert (model, frozenset(pair)) in axes


@pytest.mark.long
def test_every_habit_meets_every_option() -> None:
    for habit, values in HABITS.items():
        seen = {(option, getattr(case, habit)) for case in cases() for option in case.options}
        splits = {"zero_bubble", "zbv", "dualpipe_v"} if habit == "recompute" else set()
        for option in set(OPTIONS) - splits:
            assert len({value for at, value in seen if at == option}) >= len(values) - 1, (option, habit)


def test_another_start_is_seen(one: Reference, pool: Pool) -> None:
    """Negative control of the comparison itself: a rank that clips, or accumulates, otherwise is not the same run."""
    case = plain_or_changed("dense", ("zero1",))
    assert case is not None
    for other in (replace(case, clip=0.25), replace(case, micro=1)):
        with pytest.raises(AssertionError):
            same(pool, one(other), case.ranks, case.network, case.parallel, **case.sections)
