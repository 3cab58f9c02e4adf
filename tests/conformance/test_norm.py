"""Conformance of norms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, fitting, ready, slope_fits
from tests.families import each
from xscale.core.registry import Entry, Family
from xscale.nn.init import draw
from xscale.nn.norm.norm import NORMS, Norm, NormTraits
from xscale.nn.post_step import WeightWriter
from xscale.nn.tokens import Stats, Tokens


def built(entry: Entry[Any], width: int = WIDTH) -> Norm:
    part: Norm = ready(entry.part(fitting(entry, dims(causal=False)), width))
    return part


@each(NORMS)
def test_the_shape_and_the_type_stay(entry: Entry[Any]) -> None:
    for shape in [(2, 7, WIDTH), (2, 3, 7, WIDTH), (WIDTH,)]:
        out = built(entry)(drawn(*shape))
        assert out.shape == shape
        assert out.dtype == torch.float64
    assert built(entry, 8)(drawn(2, 8)).shape == (2, 8)


@each(NORMS)
def test_each_token_by_itself_where_declared(entry: Entry[Any]) -> None:
    norm, x = built(entry), drawn(2, 7, WIDTH)
    norm.train()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    moved = close(norm(x[:, order]), norm(x)[:, order])
    changed = torch.cat((x[:, :-1], 5 * x[:, -1:]), 1)
    alone = close(norm(changed)[:, :-1], norm(x)[:, :-1])
    assert (moved and alone) == entry.traits.per_token


@each(NORMS)
def test_it_centres_where_declared(entry: Entry[Any]) -> None:
    """Seen at the start, where no bias is added."""
    norm = built(entry)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(draw(norm.init[name], tuple(parameter.shape), 0, name))
    mean = norm(drawn(2, 7, WIDTH) + 3).mean(-1)
    assert close(mean, torch.zeros_like(mean)) == entry.traits.centred


@each(NORMS)
def test_gradients_fit_differences_where_declared(entry: Entry[Any]) -> None:
    assert slope_fits(built(entry).train(), [drawn(2, 7, WIDTH)]) == entry.traits.exact_gradient


@each(NORMS)
def test_evaluation_follows_the_tokens_of_training_where_declared(entry: Entry[Any]) -> None:
    norm, x, seen = built(entry), drawn(2, 7, WIDTH), drawn(2, 7, WIDTH, seed=4)
    before, stats = norm(x), Stats()
    norm.train()
    tokens = Tokens.from_ids(torch.zeros(2, 7, dtype=torch.long), stats=stats, aux_loss_weight=1.0)
    norm(seen.requires_grad_(), tokens).square().sum().backward()
    norm.update_state(stats.means(), WeightWriter())
    norm.eval()
    assert close(norm(x), before) != entry.traits.batch_statistics


class Plain(Norm):
    """Nothing at all: per token, not centred."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return x


class OverTokens(Plain):
    """Normalises over the sequence."""

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        return x - x.mean(1, keepdim=True)


def registered(part: type[Norm], *, per_token: bool, centred: bool) -> Entry[Any]:
    family: Family[NormTraits] = Family("norm", NormTraits)
    family.register("cheat", traits=NormTraits(per_token=per_token, centred=centred))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    honest = registered(Plain, per_token=True, centred=False)
    test_each_token_by_itself_where_declared(honest)
    test_it_centres_where_declared(honest)
    with pytest.raises(AssertionError):
        test_it_centres_where_declared(registered(Plain, per_token=True, centred=True))
    with pytest.raises(AssertionError):
        test_each_token_by_itself_where_declared(registered(OverTokens, per_token=True, centred=False))
    test_each_token_by_itself_where_declared(registered(OverTokens, per_token=False, centred=False))
