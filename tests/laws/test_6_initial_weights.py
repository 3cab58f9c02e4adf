"""Law 6: initial weights are a function of seed and parameter name, never of rank, order or layout."""

import pytest
import torch
from torch import Tensor, nn

from tests.families import each, family
from xscale.core.registry import Entry
from xscale.nn.init import Init, draw
from xscale.nn.materialize import materialize, replace_parameters
from xscale.nn.model.model import MODELS, Model
from xscale.nn.module import parameter_inits


def built(entry: Entry[object]) -> Model:
    """A small model on meta, as every layout builds it."""
    with torch.device("meta"):
        model: Model = entry.part(entry.part.Config(width=16), 32, 12)
    return model


def weights(model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    materialize(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@each(MODELS)
def test_the_seed_decides(entry: Entry[object]) -> None:
    first = weights(built(entry))
    torch.manual_seed(99)
    torch.rand(3)
    assert same(first, weights(built(entry)))
    other = weights(built(entry), seed=4)
    random = [name for name, _, init in parameter_inits(built(entry)) if init.kind == "normal"]
    assert random
    assert not any(torch.equal(first[name], other[name]) for name in random)


@each(MODELS)
def test_the_generator_of_torch_is_left_alone(entry: Entry[object]) -> None:
    before = torch.get_rng_state()
    weights(built(entry))
    assert torch.equal(before, torch.get_rng_state())


@each(MODELS)
def test_names_differ_so_weights_do(entry: Entry[object]) -> None:
    model = built(entry)
    random = {name for name, _, init in parameter_inits(model) if init.kind == "normal"}
    drawn = [value for name, value in weights(model).items() if name in random]
    pairs = [(a, b) for at, a in enumerate(drawn) for b in drawn[:at] if a.shape == b.shape]
    assert pairs
    assert not any(torch.equal(a, b) for a, b in pairs)


@each(MODELS)
def test_the_order_does_not_matter(entry: Entry[object]) -> None:
    whole = weights(built(entry))
    inits = list(parameter_inits(built(entry)))
    backwards = {name: draw(init, tuple(parameter.shape), 3, name) for name, parameter, init in reversed(inits)}
    assert same(whole, {name: backwards[name] for name in whole})


@each(MODELS)
def test_a_stage_with_some_blocks_starts_as_the_whole(entry: Entry[object]) -> None:
    whole = weights(built(entry))
    stage = built(entry)
    for module in list(stage.modules()):
        if isinstance(module, nn.ModuleDict):
            for block in ("0", "2"):
                del module[block]
    part = weights(stage)
    assert 0 < len(part) < len(whole)
    assert same(part, {name: whole[name] for name in part})


@pytest.mark.parametrize("init", [Init(std=0.3), Init(std=0.3, slices=True), Init("zeros"), Init("ones")], ids=str)
def test_a_rank_draws_its_rows_as_the_whole(init: Init) -> None:
    whole = draw(init, (8, 3, 5), 1, "experts.up")
    parts = [draw(init, (8, 3, 5), 1, "experts.up", range(start, start + 2)) for start in range(0, 8, 2)]
    assert torch.equal(whole, torch.cat(parts))


def test_shared_parameters_stay_shared() -> None:
    model = family("model").get(MODELS.names()[0])
    tied = built(model)
    names = {id(parameter) for parameter in tied.parameters()}
    materialize(tied, 0)
    assert len(names) == len(list(tied.parameters()))


def test_a_start_that_depends_on_order_is_seen() -> None:
    """The negative control: drawing from one generator, as torch's own modules do."""

    def start(skip: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        if skip:
            del model["a"]
        replace_parameters(model, lambda name, one: nn.Parameter(torch.randn_like(one)))
        return {name: parameter.detach() for name, parameter in model.named_parameters() if name.startswith("b")}

    assert not same(start(skip=True), start(skip=False))
