"""Conformance of attention cores over parts of a sequence: decoding, and each context style. No core is named here."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import (
    HEADS,
    LENGTH,
    close,
    core,
    qkv,
    run,
)
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.ops.recurrence import Recurrence, advance_state


@check("core", lambda entry: entry.traits.decode)
def one_query_at_a_time_gives_the_same(entry: Entry[Any]) -> None:
    part, (q, k, v) = core(entry), qkv(groups=2)
    full = run(part, q, k, v)
    spans = [(0, 1), (0, 100), (63, 64), (64, 65), (65, 66), (100, 107), (200, 300), (299, 300)]
    cache: dict[str, Tensor] | None = None
    if part.keeps_state:
        spans, cache = [(0, 1), (1, 63), (63, 64), (64, 65), (65, 66), (66, 299), (299, 300)], {}
    for first, last in spans:
        mask = AttentionMask(last - first, last, True, offset=first, cache=cache)
        some = run(part, q[:, :, first:last], k[:, :, :last], v[:, :, :last], mask=mask)
        assert close(some, full[:, :, first:last]), f"queries {first} to {last} over a cache"


@check("core")
def a_sequence_can_be_spread_as_declared(entry: Entry[Any]) -> None:
    for style in entry.traits.context:
        if style == "ulysses":
            assert entry.traits.per_head, "ulysses gives each rank some heads of the whole sequence"
        elif style == "ring":
            assert entry.traits.exact, "a ring adds up the softmax over each rank's keys"
        elif style == "halo":
            part = core(entry)
            assert part.block_layout(LENGTH, HEADS) is not None, (
                "a halo is fetched by the layout's blocks"
            )
            assert entry.traits.decode, (
                "a rank's queries stand behind the keys of the ranks before it"
            )
        elif style == "scan":
            _scans(entry)
        else:
            raise AssertionError(f"nothing here checks the context style '{style}'")


def _scans(entry: Entry[Any]) -> None:
    """A piece gives what it gives in the whole when the states before it are added up, or taken on, and given to it."""
    part, (q, k, v) = core(entry), qkv(groups=2)
    full, outs = run(part, q, k, v), []
    left: dict[int, list[Tensor]] = {}
    carried: list[Tensor] = []
    sizes = set()
    for first, last in [(0, 100), (100, 101), (101, 300)]:

        def before(state: Tensor) -> Tensor:
            # A core may carry states of several widths.
            states = left.setdefault(state.shape[-1], [])
            states.append(state)
            return sum(states[:-1], torch.zeros_like(state))

        def taken_on(recurrence: Recurrence) -> Tensor:
            matrix, ended = recurrence.transition()
            state = carried[-1] if carried else torch.zeros_like(ended)
            carried.append(advance_state(matrix, state) + ended)
            sizes.add(matrix[0, 0].numel() + ended[0, 0].numel())
            return state

        some, length = [x[:, :, first:last] for x in (q, k, v)], last - first
        outs.append(
            run(
                part,
                *some,
                mask=AttentionMask(
                    length, length, True, prior_state=before, carried_state=taken_on
                ),
            )
        )
    assert close(torch.cat(outs, 2), full)
    assert (sizes or {0}) == {part.transition_size}
