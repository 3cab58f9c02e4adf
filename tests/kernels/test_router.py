"""route and slots against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale_kernels.router import route, slots


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_scores_of_the_best(score: str, renormalise: bool) -> None:
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    routed = route(logits, 2, score=score, bias=bias, renormalise=renormalise)
    assert (routed.experts[:, 0] == 1).all()
    free = logits.detach().clone()
    free[:, 1] = -torch.inf
    assert torch.equal(routed.experts[:, 1], free.argmax(1))
    wanted = routed.scores.gather(1, routed.experts)
    torch.testing.assert_close(routed.weights, wanted / wanted.sum(1, keepdim=True) if renormalise else wanted)
    assert torch.autograd.gradcheck(lambda x: route(x, 2, score=score, renormalise=renormalise)[:2], (logits,))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_slots_count_those_before(N: int, E: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, E))
    rows = [data.draw(st.permutations(range(E)))[:k] for _ in range(N)]
    experts = torch.tensor(rows, dtype=torch.int64).view(N, k)
    for order in ("choice", "token"):
        places, counts = slots(experts, E, order=order)  # type: ignore[arg-type]
        queues: list[list[tuple[int, int]]] = [[] for _ in range(E)]
        pairs = (
            [(n, c) for c in range(k) for n in range(N)]
            if order == "choice"
            else [(n, c) for n in range(N) for c in range(k)]
        )
        for n, c in pairs:
            assert places[n, c] == len(queues[experts[n, c]])
            queues[experts[n, c]].append((n, c))
        assert counts.tolist() == [len(queue) for queue in queues]


def test_capacity_drops_the_last_and_their_gradient() -> None:
    logits = torch.zeros(6, 3, dtype=torch.float64)
    logits[:, 0] = 1
    logits.requires_grad_()
    routed = route(logits, 1, capacity=4)
    assert routed.places is not None
    assert routed.counts is not None
    assert routed.counts.tolist() == [6, 0, 0]
    assert (routed.weights > 0).flatten().tolist() == [True] * 4 + [False] * 2
    (gradient,) = torch.autograd.grad(routed.weights.sum(), logits)
    assert gradient[:4].any()
    assert not gradient[4:].any()


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="k from 1 to E"):
        route(torch.zeros(3, 2), 3)
