"""Selective recompute: the numbers of one process, no product computed twice, and less kept than without it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.conformance.made import WIDTH, dims, drawn, fitting, ready, tokens
from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, alone, asked, batch_of, same
from tests.parallel.models import DENSE, MIXTURE, PAIR, SPARSE
from xscale.core.registry import Entry
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import Mesh
from xscale.nn.ffn.ffn import FFNS
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.recompute.activation_checkpointing import SAVED_OPS, save_matmul_outputs, with_state_of_forward
from xscale.settings.settings import build_on_meta

SELECTIVE = {"recompute": {"every": 1, "granularity": "selective"}}
FULL = {"recompute": {"every": 1}}
CHEAP = ("aten::mul", "aten::add", "aten::gelu", "aten::silu", "aten::native_layer_norm")
"""Operators that are recomputed."""
MODELS = {"dense": DENSE, "mixture": MIXTURE, "sparse": SPARSE, "pair": PAIR}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_without_it(name: str, pool: Pool) -> None:
    model = MODELS[name]
    same(pool, alone(pool, model, steps=2), 1, model, SELECTIVE, steps=2)


class Seen(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def ran(model: dict[str, Any], parallel: dict[str, Any]) -> Counter[str]:
    """Operators of a forward and a backward."""
    settings = asked(model, parallel)
    network = build_on_meta(settings, 67)
    mesh = Mesh(RankInfo(0, 1), Degrees(), torch.device("cpu"))
    network = ParallelPlan(settings.parallel, settings.precision, LENGTH).apply(network, mesh, SEED)
    network.train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    batch = batch_of(objective, 2, 0, 0, Stats(), not settings.data.cross_documents)
    with Seen() as seen:
        objective.loss(network, batch).backward()
    return seen.count


@pytest.mark.parametrize("name", MODELS)
def test_no_product_is_computed_twice(name: str) -> None:
    plain, selective, full = (ran(MODELS[name], parallel) for parallel in ({}, SELECTIVE, FULL))
    there = [product for product in SAVED_OPS if plain[product]]
    assert len(there) >= 2, plain
    for product in there:
        assert selective[product] == plain[product], product
    assert sum(full[product] > plain[product] for product in there) >= 2
    assert sum(selective[one] for one in CHEAP) > sum(plain[one] for one in CHEAP), "nothing was forgotten"


def test_what_was_written_over_is_seen() -> None:
    """Negative control: to take it for what the product gave would be silently wrong."""
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def spoilt(x: Tensor) -> Tensor:
        return (x @ weight).mul_(2.0).exp()

    def clean(x: Tensor) -> Tensor:
        return ((x @ weight) * 2.0).exp()

    wanted = torch.autograd.grad(clean(x).sum(), (x, weight))
    found = checkpoint(clean, x, use_reentrant=False, context_fn=save_matmul_outputs)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found.sum(), (x, weight)), wanted, strict=True))
    with pytest.raises(AssertionError, match="modified in place"):
        checkpoint(spoilt, x, use_reentrant=False, context_fn=save_matmul_outputs).sum().backward()


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squeeze_ in torch.matmul of a vector": lambda x, weight: x[0] @ weight,
    "squeeze_": lambda x, weight: (x[:1] @ weight).squeeze_(0),
    "unsqueeze_": lambda x, weight: (x @ weight).unsqueeze_(0),
    "transpose_": lambda x, weight: (x @ weight).transpose_(0, 1),
    "t_ of a view": lambda x, weight: (x @ weight).view(2, 8).t_(),
    "twice": lambda x, weight: (x @ weight).unsqueeze_(0).squeeze_(0),
    "of the second of two products": lambda x, weight: (x @ weight) @ (x[0] @ weight),
}
"""Products whose shape an operator changes in place, which changes no number."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_shape_may_be_changed_in_place(name: str) -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    product = PRODUCTS[name]

    def run(x: Tensor) -> Tensor:
        return product(x, weight).exp()

    def spoilt(x: Tensor) -> Tensor:
        return product(x, weight).mul_(2.0).exp()

    wanted = torch.autograd.grad(run(x).sum(), (x, weight))
    output = checkpoint(run, x, use_reentrant=False, context_fn=save_matmul_outputs)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(output.sum(), (x, weight)), wanted, strict=True))
    if "second" not in name:  # `mv` returns what no backward needs saved
        with pytest.raises(AssertionError, match="modified in place"):
            checkpoint(spoilt, x, use_reentrant=False, context_fn=save_matmul_outputs).sum().backward()


@pytest.mark.parametrize("entry", [*MIXERS, *FFNS], ids=lambda entry: entry.name)
def test_every_part_has_its_gradients_with_saved_products(entry: Entry[Any]) -> None:
    around = dims(length=64, causal=getattr(entry.traits, "causal", True))
    part = ready(entry.part(fitting(entry, around), around)).train()
    x, about = drawn(2, 64, WIDTH).requires_grad_(), tokens(64)
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]

    def gradients(output: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad((output * drawn(*output.shape, seed=3)).sum(), [x, *parameters], allow_unused=True)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        output: Tensor = part(x, about)
        return output

    wanted = gradients(run(x))
    run = with_state_of_forward(run, (about,))
    # Without an early stop, so that no product of the recomputation is left out.
    arguments = {"use_reentrant": False, "context_fn": save_matmul_outputs, "early_stop": False}
    actual = gradients(checkpoint(run, x, **arguments))
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recompute": {"granularity": "selective"}}, "needs recomputed blocks"),
        ({**SELECTIVE, "compile": True}, "what compiled blocks save"),
    ],
)
def test_where_it_means_nothing_it_is_refused(changed: dict[str, Any], said: str) -> None:
    problems = [str(one) for one in asked(DENSE, changed).check(1)]
    assert len([one for one in problems if said in one and "Take" in one]) == 1, problems
