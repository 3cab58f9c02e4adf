"""The way out: logits, the loss without them, and a table that is shared or not."""

import pytest
import torch
import torch.nn.functional as F

from tests.conformance.made import dims, drawn, ready
from xscale.nn.head.head import IGNORE_INDEX, Head
from xscale.nn.init import Init
from xscale.nn.linear import Embedding
from xscale.nn.module import Module
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES


class Ends(Module):
    """A table and a head, as a model holds them."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = Embedding(40, 8, Init())
        self.head = Head(dims(width=8, vocabulary=40), self.table if tied else None)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_loss(tied: bool) -> None:
    ends = ready(Ends(tied))
    head = ends.head
    assert (head.weight is ends.table.weight) == tied
    assert len(list(ends.parameters())) == (1 if tied else 2)
    x, targets = drawn(2, 5, 8), torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
    logits = head(x)
    assert torch.allclose(logits, x @ head.weight.t())
    targets[0, 1] = targets[1, 4] = IGNORE_INDEX
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    loss = head(x, targets)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.parametrize("tied", [True, False])
def test_label_smoothing_is_that_of_torch(tied: bool) -> None:
    head, x = ready(Ends(tied)).head, drawn(2, 5, 8).requires_grad_()
    targets = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
    targets[0, 1] = targets[1, 4] = IGNORE_INDEX
    tokens = Tokens.from_ids(targets.clamp(min=0), label_smoothing=0.1)
    loss, logits = head(x, targets, tokens), x @ head.weight.t()
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    weights = [x, head.weight]
    for one, two in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(wanted, weights), strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert head(x, targets, Tokens.from_ids(targets)).item() == pytest.approx(plain.item(), rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_z_loss_is_the_square_of_the_log_sum_exp(smoothing: float) -> None:
    head, x = ready(Ends(True)).head, drawn(2, 5, 8).requires_grad_()
    targets = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
    targets[0, 1] = IGNORE_INDEX
    tokens = Tokens.from_ids(targets.clamp(min=0), label_smoothing=smoothing, z_loss_weight=0.3)
    logits, kept = x @ head.weight.t(), targets != IGNORE_INDEX
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
    squares = [torch.log(logits[b, t].exp().sum()) ** 2 for b in range(2) for t in range(5) if kept[b, t]]
    wanted, loss = plain + 0.3 * torch.stack(squares).sum(), head(x, targets, tokens)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    leaves = [x, head.weight]
    for one, two in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["classify", "regress", "tag"])
def test_labels_have_no_z_loss(kind: str) -> None:
    part = OBJECTIVES.get(kind).part
    problems = [str(problem) for problem in part.check(part.Config(z_loss_weight=0.1), None, 8, "objective")]
    said = "objective.z_loss_weight: keeps the logits of a vocabulary small, and labels have none. Take 0.0."
    assert said in problems


def test_gradients_of_the_loss_are_those_of_the_logits() -> None:
    head, x = ready(Head(dims(width=8), None)), drawn(2, 5, 8).requires_grad_()
    targets = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad(head(x, targets), [x, head.weight])
    plain = F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum")
    theirs = torch.autograd.grad(plain, [x, head.weight])
    assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


def test_no_target_at_all_costs_nothing() -> None:
    head, x = ready(Head(dims(width=8), None)), drawn(2, 5, 8).requires_grad_()
    loss = head(x, torch.full((2, 5), IGNORE_INDEX))
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, x)[0].any()


def test_the_loss_of_half_precision_is_summed_in_single() -> None:
    head = ready(Head(dims(width=8), None)).to(torch.bfloat16)
    loss = head(drawn(2, 5, 8).bfloat16(), torch.zeros(2, 5, dtype=torch.int64))
    assert loss.dtype == torch.float32
