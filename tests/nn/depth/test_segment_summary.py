"""The vector of the segment before: the paper's equations written out, documents, gradients, what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close
from tests.nn.depth.segments import DEPTH, SEGMENT, WIDTH, decoder, logits_of_segments, refusals, states_of, text
from tests.nn.depth.test_segment_memory import literal
from xscale.nn.depth.segment_memory.memory import EMPTY
from xscale.nn.segment_state import SEGMENT_STATE
from xscale.nn.tokens import Tokens


def written_out(model: Any, layer: int) -> Any:
    weights = dict(model.named_parameters())

    def part(name: str) -> Tensor:
        return weights[f"stack.segment_summary.{name}"]

    def summarise(of_blocks: list[Tensor]) -> list[Tensor]:
        w = part("alpha").exp() / part("alpha").exp().sum()
        z = sum(w[number] * h.sum(1) / h.shape[1] for number, h in enumerate(of_blocks))
        vector = F.gelu(z @ part("up.weight").T + part("up.bias")) @ part("down.weight").T + part("down.bias")
        nothing = vector.new_zeros(len(vector), 0, WIDTH)
        return [vector[:, None] if number == layer else nothing for number in range(DEPTH)]

    return summarise


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("residual", ["post", "pre"])
def test_segments_are_those_of_the_paper(layer: int, residual: str) -> None:
    model = decoder({"segment_summary": {"layer": layer, "hidden": 7}}, residual=residual)
    ids = text(3 * SEGMENT)
    expected = literal(model, ids, 0, post=residual == "post", summarise=written_out(model, layer))
    assert close(logits_of_segments(model, ids), expected)
    assert not close(expected, literal(model, ids, 0, post=residual == "post")), "the vector is not read"


def test_the_vector_is_of_the_document_that_goes_on() -> None:
    model = decoder({"segment_summary": {"layer": 1}})
    ids, states = text(3 * SEGMENT), states_of(model, 2)
    documents = torch.tensor([[0] * 2 + [1] * 10, [0] * SEGMENT + [1] * 8])
    apart = logits_of_segments(model, ids, documents, states=states)
    # Of the first row the second segment goes on with the document that begins at token 2.
    for row, start in ((0, 2), (1, SEGMENT)):
        states = states_of(model, 1)
        begun = ids[row : row + 1, start:SEGMENT]
        if begun.shape[1]:
            signals: dict[Any, Any] = {}
            signals[SEGMENT_STATE] = states.of_rows(0, 1)
            model(Tokens.from_ids(begun, signals=signals))
            states.commit()
        alone = logits_of_segments(model, ids[row : row + 1, SEGMENT : 2 * SEGMENT], states=states)
        assert close(apart[row : row + 1, SEGMENT : 2 * SEGMENT], alone)


def test_the_segment_that_reads_the_vector_trains_what_makes_it() -> None:
    model, ids = decoder({"segment_summary": {"layer": 1}}), text(2 * SEGMENT)
    states = states_of(model, 2)
    first = logits_of_segments(model, ids[:, :SEGMENT], states=states)
    parameters = [model.stack.segment_summary.alpha, model.stack.segment_summary.down.weight]
    assert all(gradient is None or not gradient.any() for gradient in grads(first, parameters))
    second = logits_of_segments(model, ids[:, SEGMENT:], states=states)
    assert all(gradient is not None and gradient.any() for gradient in grads(second, parameters))
    assert states.tensors["stack.segment_summary.documents"].tolist() == [[0], [0]]
    states.reset()
    assert (states.tensors["stack.segment_summary.documents"] == EMPTY).all()


def grads(logits: Tensor, parameters: list[Any]) -> Any:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)


@pytest.mark.parametrize(
    ("stack", "changes", "words"),
    [
        ({"segment_summary": {"layer": 2}}, {}, "a stack of depth=2 has blocks 0 to 1"),
        ({"segment_summary": {}, "segment_memory": {"length": 3}}, {}, "or one vector of them"),
        ({"segment_summary": {}}, {"mixer": {"core": "linear"}}, "core 'linear' has as many queries as keys"),
    ],
    ids=["no such block", "two memories", "core"],
)
def test_what_is_refused(stack: Any, changes: dict[str, Any], words: str) -> None:
    assert words in refusals(stack, **changes)
