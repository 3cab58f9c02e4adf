"""Cores with `running_stats`: `update_state` moves parameters without a gradient. No core is named here."""

from typing import Any

import torch

from xscale.conformance.attention.core import modes
from xscale.conformance.check import check
from xscale.conformance.small_parts import LENGTH, close, core, other_from, qkv, run
from xscale.core.registry import Entry
from xscale.nn.attention.core import Core
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.post_step import update_non_gradient_state
from xscale.nn.tokens import Stats


def running_parameters(part: Core) -> torch.Tensor:
    """All parameters without a gradient, flattened."""
    still = [
        parameter.detach().flatten()
        for parameter in part.parameters()
        if not parameter.requires_grad
    ]
    return torch.cat(still).clone() if still else torch.zeros(0)


def collected_stats(part: Core, causal: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Means of the statistics that a forward in training collects for `update_state`."""
    inputs, tally = qkv(), Stats()
    inputs = [other_from(x, 0) for x in inputs] if seed else inputs
    run(part.train(), *inputs, mask=AttentionMask(LENGTH, LENGTH, causal, stats=tally))
    return tally.means()


@check("core")
def only_they_have_parameters_without_a_gradient(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        assert (
            bool(running_parameters(core(entry, causal=causal)).numel())
            == entry.traits.running_stats
        )


@check("core", lambda entry: entry.traits.running_stats)
def the_state_follows_the_tokens(entry: Entry[Any]) -> None:
    for causal in modes(entry):
        part = core(entry, causal=causal)
        before, means = running_parameters(part), collected_stats(part, causal)
        assert close(running_parameters(part), before), "a forward changes the state"
        update_non_gradient_state(part, means)
        after = running_parameters(part)
        assert not close(after, before), "update_state changes nothing"
        other = core(entry, causal=causal)
        update_non_gradient_state(other, collected_stats(other, causal, seed=1))
        assert not close(running_parameters(other), after), (
            "the state does not depend on the tokens"
        )
        tally = Stats()
        run(part.eval(), *qkv(), mask=AttentionMask(LENGTH, LENGTH, causal, stats=tally))
        assert tally.means() == {}, "evaluation collects statistics"


@check("core", lambda entry: entry.traits.running_stats and entry.traits.per_head)
def statistics_of_ranks_with_other_heads_average_to_the_full_model(entry: Entry[Any]) -> None:
    """The mean over ranks, each with half of the heads, moves it as one process does."""
    for causal in modes(entry):
        full, tally = core(entry, causal=causal).train(), Stats()
        means = collected_stats(full, causal)
        names = {
            name: parameter
            for name, parameter in full.named_parameters()
            if not parameter.requires_grad
        }
        for first in (0, 2):
            half = core(entry, causal=causal).train()
            for name, parameter in names.items():
                half.get_parameter(name).data = parameter.data[first : first + 2].clone()
            half.first_head = first
            some = [x[:, first : first + 2] for x in qkv()]
            run(half, *some, mask=AttentionMask(LENGTH, LENGTH, causal, stats=tally))
        other = core(entry, causal=causal)
        update_non_gradient_state(full, means)
        update_non_gradient_state(other, tally.means())
        assert close(running_parameters(full), running_parameters(other))
