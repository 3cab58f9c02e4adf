"""Every core, ffn and router with its noise on gives the numbers of one process on every layout, or `check` refuses it.

No part is named here: a part's noise is what its config's fields of noise say, and the draws of training itself. A part
that a layout refuses with its noise is one that it refuses without, so that noise costs no layout unless `REFUSED` says
so.
"""

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.distributed import Pool
from tests.families import each, example, family
from tests.parallel.against_one import Found, asked, compare, trained
from tests.parallel.models import Model
from xscale.core.config import encode
from xscale.core.registry import Entry
from xscale.parallel import layout_invariant_random
from xscale.parallel.layout_invariant_random import HeadsOfCore

NOISE = {"dropout": 0.3, "expert_dropout": 0.3, "jitter": 0.1, "redraw": True}
"""Field of a config -> the value that switches its noise on."""
NOT_NOISE = {"decay"}
"""Other fields in [0, 1)."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}},
    "cp with ep": {"mesh": {"cp": 2, "ep": 2}},
    "tp with ep": {"mesh": {"tp": 2, "ep": 2, "tp_in_experts": False}},
}
"""All of two ranks."""
SECONDS = 600.0
"""Limit of a call of the workers, for the sweep of a family."""
FAMILIES = ("core", "ffn", "router")
REFUSED: dict[tuple[str, str], str] = {}
"""(part, layout) -> why it is refused with noise only."""
QUICK = {
    "tp": (("core", "sinkhorn"), ("core", "poolingformer")),
    "cp": (("core", "softmax"),),
    "ep": (("ffn", "moe"),),
}
"""Layout -> what the quick suite tries on it: parts that draw in ways of their own."""
CROSS = {"cross_documents": True}


def noisy(config: Any, *, on: bool) -> Model:
    """The config as data, with its fields of noise switched on or off."""
    values: Model = encode(config)
    return values | {name: value if on else type(value)(0) for name, value in NOISE.items() if name in values}


def model_with(name: str, entry: Entry[Any], *, on: bool = True) -> Model:
    """A model of one block around the part; draws behind the part show whether it drew as much as on one process."""
    part = noisy(example(entry), on=on)
    mixer: Model = {"kind": "attention", "heads": 4, "kv_heads": 2, "shared_qk": False}
    ffn: Model = {"kind": "dense", "hidden": 32}
    kind = "decoder"
    if name == "core":
        mixer |= {"core": part, "dropout": NOISE["dropout"] if on and entry.traits.dropout else 0.0}
        kind = "decoder" if entry.traits.causal else "encoder"
    elif name == "ffn":
        ffn = part | ({"hidden": 32} if "hidden" in part else {})
    if name == "router" or part["kind"] == "moe":
        router = {"router": part} if name == "router" else {}
        ffn = noisy(family("ffn").get("moe").part.Config(experts=4), on=on)
        ffn |= {"expert": {"kind": "dense", "hidden": 16}, "allow_noncausal_routing": True, **router}
    block = {"mixer": mixer, "ffn": ffn, "dropout": 0.1 if on else 0.0}
    return {"kind": kind, "width": 32, "dropout": 0.1 if on else 0.0, "stack": {"depth": 1, "block": block}}


def problems(model: Model, layout: str) -> list[str]:
    found = asked(model, LAYOUTS[layout], data=CROSS).check(2)
    assert all(problem.advice for problem in found), found
    return [str(problem) for problem in found]


def train_each(models: list[Model], parallel: Model) -> list[Found]:
    """A step of each model on this rank."""
    return [trained(model, parallel, steps=1, data=CROSS) for model in models]


def train_each_with_local_draws(models: list[Model], parallel: Model) -> list[Found]:
    """The same, where a rank draws the numbers of its own shard."""

    def local(numbers: Any, make: Any, shape: tuple[int, ...], dims: Any, tokens: Any = None) -> Tensor:
        return make(shape)

    sharded = layout_invariant_random.ShardedRandomNumbers
    with patch.object(sharded, "draw", local), patch.object(HeadsOfCore, "offset", lambda numbers, dim: 0):
        return train_each(models, parallel)


def allowed(parts: list[tuple[str, Entry[Any]]], layout: str) -> list[Model]:
    """The parts' models that the layout runs with noise."""
    models = []
    for name, entry in parts:
        refusals = problems(model_with(name, entry), layout)
        if not refusals:
            models.append(model_with(name, entry))
        elif (entry.name, layout) not in REFUSED:
            assert problems(model_with(name, entry, on=False), layout), refusals
    return models


def hold(pool: Pool, parts: dict[str, list[tuple[str, Entry[Any]]]]) -> None:
    """Compare what runs of each layout's parts with one process; the workers are called once a layout."""
    runnable = {layout: allowed(some, layout) for layout, some in parts.items()}
    models = {str(model): model for some in runnable.values() for model in some}
    found = pool.run(train_each, 1, list(models.values()), {}, timeout_seconds=SECONDS)[0]
    alone = dict(zip(models, found, strict=True))
    for layout, some in runnable.items():
        everyone = pool.run(train_each, 2, some, LAYOUTS[layout], timeout_seconds=SECONDS)
        for index, model in enumerate(some):
            try:
                compare(alone[str(model)], [founds[index] for founds in everyone])
            except AssertionError as error:
                raise AssertionError(f"{layout}: {model['stack']['block']}: {error}") from error


@pytest.mark.long
def test_parts_that_draw_in_their_own_ways(pool: Pool) -> None:
    hold(pool, {layout: [(name, family(name).get(kind)) for name, kind in parts] for layout, parts in QUICK.items()})


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "core" else []) for name in FAMILIES]
)
def test_every_part(name: str, pool: Pool) -> None:
    hold(pool, {layout: [(name, entry) for entry in family(name)] for layout in LAYOUTS})


@pytest.mark.long
def test_local_draws_are_seen(pool: Pool) -> None:
    """The negative control: draws of a rank's own shard give other numbers, so the comparison reads the noise."""
    for layout, kind in (("tp", "sinkhorn"), ("cp", "softmax"), ("tp", "block_sparse")):
        model = model_with("core", family("core").get(kind))
        alone = pool.run(train_each, 1, [model], {})[0]
        everyone = pool.run(train_each_with_local_draws, 2, [model], LAYOUTS[layout])
        with pytest.raises(AssertionError):
            compare(alone[0], [found[0] for found in everyone])


@each(entry for name in FAMILIES for entry in family(name))
def test_fields_of_noise_are_switched_on(entry: Entry[Any]) -> None:
    """A new probability in a config is either noise, and listed here, or said not to be."""
    for field, info in entry.part.Config.model_fields.items():
        bounds = {type(bound).__name__: bound for bound in info.metadata}
        probability = "Ge" in bounds and "Lt" in bounds and bounds["Ge"].ge == 0 and bounds["Lt"].lt == 1
        assert not probability or field in NOISE.keys() | NOT_NOISE, f"{entry.name}.{field}"
