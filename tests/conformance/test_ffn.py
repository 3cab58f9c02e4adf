"""Conformance of feed-forward parts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, fitting, numbered, ready, slope_fits, tokens
from tests.families import each
from xscale.core.registry import Entry, Family
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, FfnTraits
from xscale.nn.forward import Forward
from xscale.nn.linear import Linear
from xscale.nn.tokens import Tokens

LENGTH = 24


def built(entry: Entry[Any], **changes: Any) -> Ffn:
    around = dims(length=LENGTH, **changes)
    part: Ffn = ready(entry.part(fitting(entry, around), around))
    return part


@each(FFNS)
def test_the_shape_and_the_type_stay(entry: Entry[Any]) -> None:
    for batch, length in [(2, LENGTH), (1, 1), (3, 7)]:
        out = built(entry)(drawn(batch, length, WIDTH), tokens(length, batch))
        assert out.shape == (batch, length, WIDTH)
        assert out.dtype == torch.float64


@each(FFNS)
def test_each_token_by_itself_where_declared(entry: Entry[Any]) -> None:
    part, x, around = built(entry), drawn(2, LENGTH, WIDTH), tokens(LENGTH)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    moved = replace(around, ids=around.ids[:, order], positions=around.positions[:, order])
    same = close(part(x[:, order], moved), part(x, around)[:, order])
    # A part that says less than it keeps is believed: with other settings of its config it may not keep it.
    assert same or not entry.traits.per_token


@each(FFNS)
def test_a_causal_model_sees_no_future_through_it(entry: Entry[Any]) -> None:
    part, x, around = built(entry, causal=True), drawn(2, LENGTH, WIDTH), tokens(LENGTH)
    whole = part(x, around)
    for cut in (1, 7, LENGTH - 1):
        changed = torch.cat((x[:, :cut], 3 * x[:, cut:] + 1), 1)
        assert close(part(changed, around)[:, :cut], whole[:, :cut])


@each(FFNS)
def test_a_token_uses_a_part_of_the_weights_where_declared(entry: Entry[Any]) -> None:
    """A sparse part's weights get a gradient from a token here and there only; half could be a matter of ReLU."""
    part = built(entry)
    parameters = [parameter for parameter in part.parameters() if parameter.dim() > 1]
    if not parameters:
        assert not entry.traits.sparse
        return
    for seed in range(4):
        out = part(drawn(1, 1, WIDTH, seed=seed), tokens(1, 1)).square().sum()
        gradients = torch.autograd.grad(out, parameters, allow_unused=True)
        used = sum(int(gradient.count_nonzero()) for gradient in gradients if gradient is not None)
        assert (used < 0.45 * sum(parameter.numel() for parameter in parameters)) == entry.traits.sparse


@each(entry for entry in FFNS if not entry.traits.sparse)
def test_gradients_fit_differences(entry: Entry[Any]) -> None:
    """Where no choice makes steps."""
    part, around = built(entry), tokens(LENGTH)
    assert slope_fits(lambda x: part(x, around), [drawn(2, LENGTH, WIDTH)])


class Whole(Ffn):
    """A linear map."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.map = Linear(dims.width, dims.width, ("ffn", "width"), dims.init)

    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        out: Tensor = self.map(x)
        return out


class Averages(Whole):
    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        return x + super().forward(x.mean(1, keepdim=True), tokens)


class Quarter(Whole):
    """Each token uses one quarter of the rows or another."""

    def forward(self, x: Tensor, tokens: Any) -> Tensor:
        return super().forward(x, tokens) * (torch.arange(x.shape[-1]) % 4 == (x[..., :1] > 0))


def registered(part: type[Ffn], **traits: bool) -> Entry[Any]:
    family: Family[FfnTraits] = Family("ffn", FfnTraits)
    family.register("cheat", traits=FfnTraits(**{"per_token": True, "sparse": False, **traits}))(
        type("Cheat", (part,), {})
    )
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    test_each_token_by_itself_where_declared(registered(Whole))
    test_a_token_uses_a_part_of_the_weights_where_declared(registered(Whole))
    test_a_token_uses_a_part_of_the_weights_where_declared(registered(Quarter, sparse=True))
    test_a_causal_model_sees_no_future_through_it(registered(Whole))
    for part, traits, check in [
        (Averages, {"per_token": True}, test_a_causal_model_sees_no_future_through_it),
        (Whole, {"sparse": True}, test_a_token_uses_a_part_of_the_weights_where_declared),
        (Quarter, {"sparse": False}, test_a_token_uses_a_part_of_the_weights_where_declared),
    ]:
        with pytest.raises(AssertionError):
            check(registered(part, **traits))


def test_a_part_whose_tokens_depend_on_their_order_is_caught() -> None:
    class Counts(Whole):
        def forward(self, x: Tensor, tokens: Any) -> Tensor:
            return super().forward(x, tokens).cumsum(1)

    with pytest.raises(AssertionError):
        test_each_token_by_itself_where_declared(registered(Counts))


@each(entry for entry in FFNS if entry.traits.token_shift)
def test_a_token_reads_the_one_before_it_in_its_document(entry: Entry[Any]) -> None:
    """Nothing else; and in generation the cache holds what the next token reads."""
    part, x = built(entry), drawn(2, LENGTH, WIDTH)
    whole = part(x, tokens(LENGTH))
    changed = torch.cat((x[:, :7], 3 * x[:, 7:8] + 1, x[:, 8:]), 1)
    differs = (part(changed, tokens(LENGTH)) - whole).abs().amax((0, 2)) > 1e-9
    assert differs.nonzero().flatten().tolist() == [7, 8]
    packed = part(x, tokens(LENGTH, documents=numbered(9, 2, LENGTH - 11)))
    apart = [part(piece, tokens(piece.shape[1])) for piece in x.split([9, 2, LENGTH - 11], 1)]
    assert close(packed, torch.cat(apart, 1))
    cache, around = dict[str, Any](), tokens(LENGTH)
    for begin, end in [(0, 5), (5, 6), (6, LENGTH)]:
        new = Tokens(around.ids[:, begin:end], around.positions[:, begin:end], forward=Forward(cache=cache))
        assert close(part(x[:, begin:end], new), whole[:, begin:end])


def test_cheats_of_the_token_shift_are_caught() -> None:
    class Shifts(Whole):
        def forward(self, x: Tensor, tokens: Any) -> Tensor:
            return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1], tokens)

    for part in (Whole, Averages, Shifts):
        with pytest.raises(AssertionError):
            test_a_token_reads_the_one_before_it_in_its_document(registered(part, per_token=False, token_shift=True))
