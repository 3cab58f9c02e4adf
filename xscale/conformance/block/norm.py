"""Conformance of norms."""

from typing import Any

import torch

from xscale.conformance.check import check
from xscale.conformance.small_parts import WIDTH, close, dims, drawn, fitting, ready, slope_fits
from xscale.core.registry import Entry
from xscale.nn.init import draw
from xscale.nn.norm.norm import Norm
from xscale.nn.post_step import WeightWriter
from xscale.nn.tokens import Stats, Tokens


def built(entry: Entry[Any], width: int = WIDTH) -> Norm:
    part: Norm = ready(entry.part(fitting(entry, dims(causal=False)), width))
    return part


@check("norm", at_start=True)
def the_shape_and_the_type_stay(entry: Entry[Any]) -> None:
    for shape in [(2, 7, WIDTH), (2, 3, 7, WIDTH), (WIDTH,)]:
        out = built(entry)(drawn(*shape))
        assert out.shape == shape
        assert out.dtype == torch.float64
    assert built(entry, 8)(drawn(2, 8)).shape == (2, 8)


@check("norm")
def each_token_by_itself_where_declared(entry: Entry[Any]) -> None:
    norm, x = built(entry), drawn(2, 7, WIDTH)
    norm.train()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    moved = close(norm(x[:, order]), norm(x)[:, order])
    changed = torch.cat((x[:, :-1], 5 * x[:, -1:]), 1)
    alone = close(norm(changed)[:, :-1], norm(x)[:, :-1])
    assert (moved and alone) == entry.traits.per_token


@check("norm")
def it_centres_where_declared(entry: Entry[Any]) -> None:
    """Seen at the start, where no bias is added."""
    norm = built(entry)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(draw(norm.init[name], tuple(parameter.shape), 0, name))
    mean = norm(drawn(2, 7, WIDTH) + 3).mean(-1)
    assert close(mean, torch.zeros_like(mean)) == entry.traits.centred


@check("norm")
def gradients_fit_differences_where_declared(entry: Entry[Any]) -> None:
    assert slope_fits(built(entry).train(), [drawn(2, 7, WIDTH)]) == entry.traits.exact_gradient


@check("norm")
def evaluation_follows_the_tokens_of_training_where_declared(entry: Entry[Any]) -> None:
    norm = built(entry)
    x = drawn(2, 7, WIDTH)
    seen = drawn(2, 7, WIDTH, seed=4)
    before, stats = norm(x), Stats()
    norm.train()
    tokens = Tokens.from_ids(torch.zeros(2, 7, dtype=torch.long), stats=stats, aux_loss_weight=1.0)
    norm(seen.requires_grad_(), tokens).square().sum().backward()
    norm.update_state(stats.means(), WeightWriter())
    norm.eval()
    assert close(norm(x), before) != entry.traits.batch_statistics
