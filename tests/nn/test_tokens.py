"""Tokens know their places; a tally means what it says however often a forward is run again."""

import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from tests.conformance.made import numbered
from xscale.nn.attention.ops.mask import OBSERVED, AttentionMask
from xscale.nn.auxiliary import attach
from xscale.nn.depth.token_windows import TokenWindows
from xscale.nn.forward import Forward
from xscale.nn.head.boundary_head import BOUNDARIES
from xscale.nn.head.pooler import LABELS
from xscale.nn.tokens import Stats, Tokens


def test_positions_count_from_each_documents_start() -> None:
    ids = torch.zeros(2, 7, dtype=torch.int64)
    assert Tokens.from_ids(ids).positions.tolist() == [list(range(7))] * 2
    assert Tokens.from_ids(ids, numbered(3, 4)).positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    back_again = torch.tensor([[5, 5, 2, 2, 5, 5, 5]])
    assert Tokens.from_ids(ids[:1], back_again).positions[0].tolist() == [0, 1, 0, 1, 0, 1, 2]


def test_a_shared_value_is_computed_once_for_each_micro_batch() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    first, second = Tokens.from_ids(ids), Tokens.from_ids(ids)
    computed: list[int] = []

    def compute() -> int:
        computed.append(len(computed))
        return computed[-1]

    values = [tokens.shared_values.get_or_compute("x", compute) for tokens in (first, replace(first), second, first)]
    assert values == [0, 0, 1, 0]
    before = first.shared_values.copy()
    first.shared_values.get_or_compute("y", compute)
    first.shared_values.reset(before)
    assert first.shared_values.get_or_compute("y", compute) == 3


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (1, [x]), lambda x: AttentionMask(2, 2, causal=True, bias=x)])
def test_a_shared_value_has_no_graph(wrap: Callable[[torch.Tensor], object]) -> None:
    """Two pipeline stages of a rank would run backward through it, and the first frees it."""
    values = Tokens.from_ids(torch.zeros(1, 2, dtype=torch.int64)).shared_values
    weight = torch.ones(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(AssertionError, match="requires grad"):
        values.get_or_compute("x", lambda: wrap(2 * weight))
    values.get_or_compute("x", lambda: wrap(2 * weight.detach()))


def test_a_tally_is_a_mean() -> None:
    tally = Stats()
    for value in (1.0, 2.0, 6.0):
        tally.add("load", torch.tensor([value, 0.0], requires_grad=True))
    tally.add("dropped", torch.tensor(0.5, dtype=torch.bfloat16))
    means = tally.means()
    assert means["load"].tolist() == [3.0, 0.0]
    assert means["dropped"].item() == 0.5
    assert not means["load"].requires_grad
    assert means["dropped"].dtype == torch.float64  # the same sums however micro-batches are dealt out


def test_an_attached_loss_is_added_in_backward_only() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = attach(x, x.square().sum(), 0.5)
    assert torch.equal(y, x)
    (gradient,) = torch.autograd.grad(3 * y.sum(), x)
    assert gradient.tolist() == [3 + 0.5 * 2, 3 + 0.5 * 4]
    assert attach(x, x.sum(), None) is x


def test_every_tensor_of_the_tokens_declares_its_axes() -> None:
    """Or nothing would map, shard, pool or cut it."""
    tensors = {name for name, hint in get_type_hints(Tokens).items() if hint in (Tensor, Tensor | None)}
    assert tensors == {each.name for each in fields(Tokens) if "axes" in each.metadata}


def drawn_tokens() -> Tokens:
    """Two samples of 4 tokens, whose fields tell sample (hundreds), token (tens) and what they are."""
    grid = 100 * torch.arange(2)[:, None] + 10 * torch.arange(4)  # [B, T]
    return Tokens(
        ids=grid,
        positions=torch.arange(4).expand(2, 4),
        types=grid + 1,
    ).with_signals(
        {
            OBSERVED: grid[..., None] + torch.arange(4),
            BOUNDARIES: torch.arange(4)[:, None].expand(2, 4, 2),
            LABELS: torch.tensor([7, 8]),
        }
    )


SIGNALS = {"observed": OBSERVED, "boundaries": BOUNDARIES, "labels": LABELS}

CUTS: dict[str, tuple[Callable[[Tokens], Tokens], dict[str, object]]] = {
    "windows of two": (
        lambda tokens: TokenWindows.split(4, torch.device("cpu"), separate_first=False).window_tokens(tokens),
        {"ids": [0, 20], "types": [1, 21], "observed": [[0, 2], [20, 22]], "labels": 7, "boundaries": [[0, 0], [1, 1]]},
    ),
    "one sample without padding": (
        lambda tokens: tokens.without_padding(torch.tensor([1]), 2),
        {"ids": [100, 110], "types": [101, 111], "observed": [[100, 101], [110, 111]], "labels": 8},
    ),
    "a global token before": (
        lambda tokens: tokens.with_global_tokens(1),
        {"ids": [0, 0, 10, 20, 30], "types": [0, 1, 11, 21, 31], "positions": [0, 1, 2, 3, 4], "labels": 7},
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_every_field_is_cut_along_its_axes(name: str) -> None:
    cut, expected = CUTS[name]
    tokens = cut(drawn_tokens())
    for field, value in expected.items():
        values = tokens.get(SIGNALS[field]) if field in SIGNALS else getattr(tokens, field)
        first = values[0].tolist()
        assert (first[: len(value)] if isinstance(value, list) else first) == value, field
    of_signals = [tokens.get(signal) for signal in SIGNALS.values()]
    assert {len(value) for value in of_signals if value is not None} == {len(tokens.ids)}, "all have the same samples"


def test_a_part_from_outside_may_read_the_forward_off_the_tokens() -> None:
    tokens = Tokens.from_ids(torch.zeros(1, 2, dtype=torch.int64), rng_seed=3, forward=Forward(progress=0.5))
    outside: Any = tokens.with_forward(cache={})
    assert (outside.rng_seed, outside.progress, outside.cache) == (3, 0.5, {}) == (
        outside.forward.rng_seed, outside.forward.progress, outside.forward.cache,
    )  # fmt: skip
    with pytest.raises(AttributeError, match="no 'seed'"):
        _ = outside.seed
    assert pickle.loads(pickle.dumps(tokens)).rng_seed == 3
