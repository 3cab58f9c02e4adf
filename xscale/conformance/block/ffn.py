"""Conformance of feed-forward parts."""

from dataclasses import replace
from typing import Any

import torch

from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    WIDTH,
    close,
    dims,
    drawn,
    fitting,
    numbered,
    ready,
    slope_fits,
    tokens,
)
from xscale.core.registry import Entry
from xscale.nn.ffn.ffn import Ffn
from xscale.nn.forward import Forward
from xscale.nn.neighbours import NeighbourReader
from xscale.nn.tokens import Tokens

LENGTH = 24


def built(entry: Entry[Any], **changes: Any) -> Ffn:
    around = dims(length=LENGTH, **changes)
    part: Ffn = ready(entry.part(fitting(entry, around), around))
    return part


@check("ffn", at_start=True)
def the_shape_and_the_type_stay(entry: Entry[Any]) -> None:
    for batch, length in [(2, LENGTH), (1, 1), (3, 7)]:
        out = built(entry)(drawn(batch, length, WIDTH), tokens(length, batch))
        assert out.shape == (batch, length, WIDTH)
        assert out.dtype == torch.float64


@check("ffn")
def each_token_by_itself_where_declared(entry: Entry[Any]) -> None:
    part = built(entry)
    x = drawn(2, LENGTH, WIDTH)
    around = tokens(LENGTH)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    moved = replace(around, ids=around.ids[:, order], positions=around.positions[:, order])
    same = close(part(x[:, order], moved), part(x, around)[:, order])
    # A part that says less than it keeps is believed: with other settings of its config it may not keep it.
    assert same or not entry.traits.per_token


@check("ffn", at_start=True)
def a_causal_model_sees_no_future_through_it(entry: Entry[Any]) -> None:
    part = built(entry, causal=True)
    x = drawn(2, LENGTH, WIDTH)
    around = tokens(LENGTH)
    full = part(x, around)
    for cut in (1, 7, LENGTH - 1):
        changed = torch.cat((x[:, :cut], 3 * x[:, cut:] + 1), 1)
        assert close(part(changed, around)[:, :cut], full[:, :cut])


@check("ffn")
def a_token_uses_a_part_of_the_weights_where_declared(entry: Entry[Any]) -> None:
    """A sparse part's weights get a gradient from a token here and there only; half could be a matter of ReLU."""
    part = built(entry)
    parameters = [parameter for parameter in part.parameters() if parameter.dim() > 1]
    if not parameters:
        assert not entry.traits.sparse
        return
    # A token that reads its neighbours uses the weights of each of their places.
    length = LENGTH if entry.traits.reads_neighbours else 1
    for seed in range(4):
        x = drawn(1, length, WIDTH, seed=seed)
        out = part(x, tokens(length, 1))[:, length // 2].square().sum()
        gradients = torch.autograd.grad(out, parameters, allow_unused=True)
        used = sum(int(gradient.count_nonzero()) for gradient in gradients if gradient is not None)
        assert (
            used < 0.45 * sum(parameter.numel() for parameter in parameters)
        ) == entry.traits.sparse


@check("ffn", lambda entry: not entry.traits.sparse)
def gradients_fit_differences(entry: Entry[Any]) -> None:
    """Where no choice makes steps."""
    part, around = built(entry), tokens(LENGTH)
    assert slope_fits(lambda x: part(x, around), [drawn(2, LENGTH, WIDTH)])


@check("ffn", lambda entry: entry.traits.reads_neighbours)
def a_token_reads_its_neighbours_in_its_document(entry: Entry[Any]) -> None:
    """As many as the part's `NeighbourReader`s say, and nothing else."""
    for causal in (True, False):
        part, x = built(entry, causal=causal), drawn(2, LENGTH, WIDTH)
        readers = [module for module in part.modules() if isinstance(module, NeighbourReader)]
        left, right = (
            sum(getattr(reader, side) for reader in readers) for side in ("left", "right")
        )
        assert left + right > 0
        full = part(x, tokens(LENGTH))
        changed = torch.cat((x[:, :9], 3 * x[:, 9:10] + 1, x[:, 10:]), 1)
        differs = (part(changed, tokens(LENGTH)) - full).abs().amax((0, 2)) > 1e-9
        assert differs.nonzero().flatten().tolist() == list(range(9 - right, 10 + left))
        packed = part(x, tokens(LENGTH, documents=numbered(9, 2, LENGTH - 11)))
        apart = [
            part(piece, tokens(piece.shape[1])) for piece in torch.split(x, [9, 2, LENGTH - 11], 1)
        ]
        assert close(packed, torch.cat(apart, 1))


@check("ffn", lambda entry: entry.traits.reads_neighbours)
def generation_keeps_what_the_next_token_reads(entry: Entry[Any]) -> None:
    """The cache holds it, and the outputs are those of the full sequence."""
    part, x = built(entry, causal=True), drawn(2, LENGTH, WIDTH)
    full = part(x, tokens(LENGTH))
    cache, around = dict[str, Any](), tokens(LENGTH)
    for begin, end in [(0, 5), (5, 6), (6, LENGTH)]:
        new = Tokens(
            around.ids[:, begin:end], around.positions[:, begin:end], forward=Forward(cache=cache)
        )
        assert close(part(x[:, begin:end], new), full[:, begin:end])
