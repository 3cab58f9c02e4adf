"""The compressed memory: the paper's equations written out for each function, its loss, documents, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close
from tests.nn.depth.segments import SEGMENT, WIDTH, decoder, logits_of_segments, refusals, states_of, text
from tests.nn.depth.test_segment_memory import literal
from xscale.nn.depth.segment_memory.memory import EMPTY
from xscale.nn.segment_state import SEGMENT_STATE
from xscale.nn.tokens import Tokens


def stack(function: str, memory: int = 4, slots: int = 3, rate: int = 2, **changes: Any) -> dict[str, Any]:
    compression = {"slots": slots, "rate": rate, "function": function, **changes}
    return {"segment_memory": {"length": memory, "compression": compression}}


def written_out(model: Any, function: str, rate: int) -> Any:
    """The function of a block by the paper: each group of `rate` states makes a slot."""
    weights = dict(model.named_parameters())

    def compress(layer: int, old: Tensor) -> Tensor:
        groups = [old[:, start : start + rate] for start in range(0, old.shape[1], rate)]
        if function == "mean":
            return torch.stack([group.sum(1) / rate for group in groups], 1)
        if function == "max":
            return torch.stack([group.max(1).values for group in groups], 1)
        name = f"stack.segment_memory.compress.{layer}.encode"
        kernel = weights[f"{name}.weight"].view(WIDTH, rate, WIDTH)
        taps = [sum(group[:, i] @ kernel[:, i].T for i in range(rate)) for group in groups]
        return torch.stack([tap + weights[f"{name}.bias"] for tap in taps], 1)

    return compress


@pytest.mark.parametrize(
    ("function", "memory", "slots", "rate"),
    [("mean", 4, 3, 2), ("max", 4, 2, 4), ("conv", 4, 3, 2), ("conv", 8, 2, 2), ("conv", 2, 5, 2)],
)
def test_segments_are_those_of_the_paper(function: str, memory: int, slots: int, rate: int) -> None:
    model, ids = decoder(stack(function, memory, slots, rate), residual="post"), text(5 * SEGMENT)
    compress = written_out(model, function, rate)
    expected = literal(model, ids, memory, compress=compress, slots=slots)
    assert close(logits_of_segments(model, ids), expected)
    assert not close(expected, literal(model, ids, memory)), "the compressed memory is not read"


def test_the_loss_is_that_of_the_auto_encoder_and_trains_it_alone() -> None:
    model, ids = decoder(stack("conv", loss_weight=3.0)), text(2 * SEGMENT)
    states = states_of(model, 2)
    logits_of_segments(model, ids[:, :SEGMENT], states=states)
    old = [states.tensors[f"stack.segment_memory.{layer}"].clone() for layer in range(2)]
    signals: dict[Any, Any] = {SEGMENT_STATE: states.of_rows(0, 2)}
    out = model(Tokens.from_ids(ids[:, SEGMENT:], signals=signals, aux_loss_weight=0.5))
    ours = torch.autograd.grad((out * 0).sum(), list(model.parameters()), allow_unused=True)
    total = torch.zeros((), dtype=torch.float64)
    for layer, states_before in enumerate(old):
        compress = model.stack.segment_memory.compress[str(layer)]
        slots = written_out(model, "conv", 2)(layer, states_before)
        back = slots @ compress.decode.weight.T + compress.decode.bias
        total = total + (back.reshape(states_before.shape) - states_before).square().mean()
    theirs = torch.autograd.grad(3.0 * 0.5 * total, list(model.parameters()), allow_unused=True)
    for (name, _), mine, other in zip(model.named_parameters(), ours, theirs, strict=True):
        if ".compress." in name:
            assert close(mine, other), name
        else:
            assert mine is None or not mine.abs().sum(), name


def test_a_slot_of_two_documents_is_not_read() -> None:
    model = decoder(stack("mean", slots=4))
    ids, states = text(3 * SEGMENT), states_of(model, 2)
    documents = torch.tensor([[0] * 3 + [1] * 9, [0] * 12])
    logits_of_segments(model, ids, documents, states=states)
    # Counted from the token behind the text, which begins a document of its own.
    compressed = states.tensors["stack.segment_memory.compressed.documents"]
    assert compressed.tolist() == [[-2, EMPTY, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 3}, "rate=3 does not divide"),
        ({"loss_weight": 0.0}, "the convolution is trained by this loss alone"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusals(stack("conv", **changes))


def test_a_longer_memory_in_evaluation_is_refused() -> None:
    memory = {**stack("mean")["segment_memory"], "eval_length": 8}
    assert "tokens leave a memory of one length" in refusals({"segment_memory": memory})
