"""Parts of a plugin get every kind of parallelism by the axes and the roles that they declare, in double precision."""

import math
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, asked, compare, trained
from tests.parallel.models import MOE
from tests.parallel.test_tensor import counted
from xscale.core.errors import Problem
from xscale.core.requirements import take
from xscale.nn.attention.core import CORES
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.roles import Role
from xscale.parallel.context.table import CONTEXT
from xscale.parallel.tensor import apply as tensor
from xscale.parallel.tensor.table import TENSOR
from xscale.settings.settings import build_on_meta

FILE = Path(__file__).with_name("outside_parts.py")
SLOPED = {"kind": "attention", "heads": 4, "kv_heads": 2, "core": {"kind": "sloped"}, "dropout": 0.1}
MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "stack": {
        "depth": 4,
        "block": {"mixer": {"kind": "normed_mean", "dropout": 0.1}, "ffn": MOE, "dropout": 0.1},
        "rules": [{"every": 2, "at": 1, "mixer": SLOPED}],
    },
}
SEQUENCE = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "tp with sp": SEQUENCE,
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "ep": {"mesh": {"ep": 2, "dp_shard": 2}},
    "all": {"mesh": {"tp": 2, "cp": 2, "pp": 2, "ep": 2}, "tensor": {"sequence": True}},
}


@contextmanager
def plugin() -> Iterator[None]:
    """Register the parts of the file, and take them out of the families again: other tests list these."""
    with patch.dict(CORES._entries), patch.dict(MIXERS._entries):
        runpy.run_path(str(FILE))
        yield


def trained_with_plugin(parallel: dict[str, Any]) -> Found:
    with plugin():
        return trained(MODEL, parallel)


def trained_without(table: str, role: str, parallel: dict[str, Any]) -> Found:
    """Train with a table that does not know a role."""
    roles = {"tensor": TENSOR, "context": CONTEXT}[table]
    with patch.dict(roles):
        del roles[Role[role]]
        return trained_with_plugin(parallel)


def sent(model: dict[str, Any], parallel: dict[str, Any]) -> float:
    with plugin():
        return counted(model, parallel)


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    found: Found = pool.run(trained_with_plugin, 1, {})[0]
    return found


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.long] * (name == "all")) for name in LAYOUTS])
def test_a_plugin_trains_on_a_layout_as_on_one_process(layout: str, one: Found, pool: Pool) -> None:
    parallel = LAYOUTS[layout]
    ranks = math.prod(degree for axis, degree in parallel["mesh"].items() if axis != "ep")
    compare(one, pool.run(trained_with_plugin, ranks, parallel))


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "role"),
    [("tensor", "FIRST_HEAD"), ("tensor", "SUM_OVER_HEADS"), ("context", "NEIGHBOURS"), ("context", "DRAWS")],
)
def test_each_role_of_the_mixer_is_needed(table: str, role: str, one: Found, pool: Pool) -> None:
    """Negative control."""
    everyone = pool.run(trained_without, 2, table, role, LAYOUTS["tp" if table == "tensor" else "cp"])
    with pytest.raises(AssertionError):
        compare(one, everyone)


@pytest.mark.long
def test_what_a_plugin_sends_over_tp_is_what_was_estimated(pool: Pool) -> None:
    model = {**MODEL, "stack": {"depth": 2, "block": {"mixer": {"kind": "normed_mean"}, "ffn": {"kind": "none"}}}}
    for layout in ("tp", "tp with sp"):
        with plugin():
            recipe = asked(model, LAYOUTS[layout], data={"sequence_length": 24})
            expected = sum(tensor.estimate(build_on_meta(recipe, 67), recipe.parallel, 24).values())
        assert pool.run(sent, 2, model, LAYOUTS[layout]) == [expected] * 2


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with plugin():
        model = {**MODEL, "stack": {"depth": 1, "block": {"mixer": {"kind": "normed_mean"}, "ffn": {"kind": "none"}}}}
        (problem,) = asked(model, {"mesh": {"tp": 3}}).check(3)
    assert (problem.what, problem.advice) == ("tp=3 does not divide heads=4", "Take 1, 2 or 4.")


@pytest.mark.long
def test_a_core_that_reads_all_heads_has_no_ulysses() -> None:
    """Its sum is over the heads of tp, and Ulysses would shard them over cp too."""
    with plugin():
        sloped = CORES.get("sloped").part
        with patch.object(sloped, "seams", {"sum_over_heads": Role.SUM_OVER_HEADS}, create=True):
            problems = asked(MODEL, {"mesh": {"cp": 2}}).check(2)
    assert any("ulysses: the core reads all heads" in problem.what for problem in problems), problems


def test_a_part_that_says_why_it_cannot_be_sharded_is_refused() -> None:
    """The reasons are the part's own, and the engine asks every module for them."""

    def no_tp(self: Mixer, tp: int, path: str) -> list[Problem]:
        return [Problem(path, f"{tp} ranks have no whole rows", choices=take(1))]

    def no_sp(self: Mixer, path: str) -> list[Problem]:
        return [Problem(path, "rows are read between regions", choices=take(False))]

    with plugin(), patch.multiple(MIXERS.get("normed_mean").part, tp_problems=no_tp, sp_problems=no_sp):
        one, two = asked(MODEL, SEQUENCE).check(2)
    assert str(one) == "parallel.mesh.tp: 2 ranks have no whole rows. Take 1."
    assert str(two) == "parallel.tensor.sequence: rows are read between regions. Take false."
