"""Padding behind samples takes no place in an expert and counts in no loss: a sample has the numbers it has alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.moe.mixture import LENGTH, mixture, sample, set_equal_counts
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.forward import Stats
from xscale.nn.tokens import PACKED_PADDING, Tokens

LENGTHS = [24, 7, 1, 16]
ROUTING: list[dict[str, Any]] = [
    *({"kind": entry.name} for entry in ROUTERS),
    {"kind": "topk", "balance_over": "sequence"},
    {"kind": "topk", "balance_over": "global_batch"},
    {"kind": "topk", "z_loss_weight": 0.1, "bias_update_rate": 0.1},
    {"kind": "expert_choice", "input_batch": "sequence"},
    {"kind": "hash", "function": "bigram"},
    {"kind": "hash", "function": "previous"},
]
BY_SEQUENCE = [router for router in ROUTING if router not in ({"kind": "expert_choice"}, {"kind": "round_robin"})]
"""Those by which a sample's routing in evaluation is a matter of the sample."""
SHARED = {"kind": "gated", "hidden": 5}


def name_of(router: dict[str, Any]) -> str:
    return "-".join(str(value) for value in router.values())


def padded(lengths: list[int], packed: bool = False) -> tuple[Tensor, Tokens]:
    """Samples of these lengths, behind which there are numbers that would be seen anywhere."""
    x, tokens = sample(rows=len(lengths))
    padding = torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]
    x = x.masked_fill(padding[..., None], 1e3)
    if packed:
        return x, tokens.with_signals({PACKED_PADDING: padding})
    return x, replace(tokens, padding=padding)


def alone(x: Tensor, tokens: Tokens, row: int, length: int) -> tuple[Tensor, Tokens]:
    """One sample without its padding."""
    ids = tokens.ids[row : row + 1, :length]
    return x[row : row + 1, :length], Tokens.from_ids(ids, forward=tokens.forward)


def built(router: dict[str, Any], **data: Any) -> Moe:
    moe = mixture(router=router, shared=SHARED, shared_combine="gate", **data)
    set_equal_counts(moe, 50)
    return moe


@pytest.mark.parametrize("packed", [False, True], ids=["samples", "packed"])
@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 1.0, "eval_capacity_factor": 0.5}], ids=["free", "tight"])
@pytest.mark.parametrize("router", BY_SEQUENCE, ids=name_of)
def test_evaluation_gives_each_sample_what_it_has_alone(
    router: dict[str, Any], capacity: dict[str, Any], packed: bool
) -> None:
    moe = built(router, **capacity).eval()
    x, tokens = padded(LENGTHS, packed)
    y = moe(x, tokens)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(y[row : row + 1, :length], moe(*alone(x, tokens, row, length)))


@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 0.5, "capacity_groups": 2}], ids=["free", "tight"])
@pytest.mark.parametrize("router", ROUTING, ids=name_of)
def test_a_padded_sample_trains_as_it_does_alone(router: dict[str, Any], capacity: dict[str, Any]) -> None:
    x, tokens = padded([7])
    seen = []
    for sizes in ((x, tokens), alone(x, tokens, 0, 7)):
        moe, stats = built(router, **capacity), Stats()
        inputs = sizes[0].clone().requires_grad_()
        y = moe(inputs, sizes[1].with_forward(stats=stats))[:, :7]
        y.square().sum().backward()
        gradients = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}
        seen.append((y, inputs.grad[:, :7], gradients, stats.means()))
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("router", [one for one in ROUTING if "sequence" not in one.values()], ids=name_of)
def test_samples_train_as_their_text_in_one_row(router: dict[str, Any]) -> None:
    """All that is averaged or compared over a micro-batch is so over its text."""
    x, tokens = padded(LENGTHS)
    text = ~tokens.padding
    row = Tokens.from_ids(tokens.ids[text][None], forward=tokens.forward)
    row = replace(row, positions=tokens.positions[text][None])
    seen = []
    for inputs, about in ((x, tokens), (x[text][None], row)):
        moe, stats = built(router, capacity_factor=0.5), Stats()
        y = moe(inputs, about.with_forward(stats=stats))
        y = y[text][None] if about.padding is not None else y
        y.square().sum().backward()
        seen.append((y, {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}, stats.means()))
    torch.testing.assert_close(*seen)


def test_the_loss_by_sequence_is_the_mean_over_samples() -> None:
    x, tokens = padded(LENGTHS)
    moe = built({"kind": "topk", "balance_over": "sequence"})

    def loss_of(x: Tensor, tokens: Tokens) -> Tensor:
        stats = Stats()
        moe(x, tokens.with_forward(stats=stats))
        (loss,) = (value for name, value in stats.means().items() if name.endswith("/aux"))
        return loss

    each = [loss_of(*alone(x, tokens, row, length)) for row, length in enumerate(LENGTHS)]
    torch.testing.assert_close(loss_of(x, tokens), torch.stack(each).mean())


def test_a_result_of_evaluation_does_not_depend_on_the_micro_batch() -> None:
    x, tokens = sample(rows=4)
    moe = mixture(capacity_factor=1.0, eval_capacity_factor=0.5).eval()
    together = moe(x, tokens)
    for row in range(4):
        torch.testing.assert_close(together[row : row + 1], moe(*alone(x, tokens, row, LENGTH)))
    assert not torch.equal(together, mixture()(x, tokens)), "nothing was dropped, so nothing was tested"
