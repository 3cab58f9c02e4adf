"""The attention guidance loss against the paper's norm, one row of weights at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.guided_attention import GuidedAttention
from xscale.nn.tokens import Tokens

LENGTH, HEADS = 24, 4
DELIMITERS, PERIODS = (3, 5), (7, 11, 13)
SETTINGS: dict[str, Any] = {"heads": HEADS, "delimiter_ids": DELIMITERS, "period_ids": PERIODS}


def mixer(*patterns: str, causal: bool = True, **settings: Any) -> GuidedAttention:
    config = GuidedAttention.Config.model_validate({**SETTINGS, "patterns": patterns, **settings})
    around = dims(length=LENGTH, causal=causal)
    assert GuidedAttention.check(config, around, "mixer") == []
    return ready(GuidedAttention(config, around))


def row(pattern: str, t: int, shown: list[int], ids: list[int]) -> list[int]:
    """Keys that token t is to look at."""
    if pattern in ("previous", "next"):
        return [s for s in shown if s == t + (1 if pattern == "next" else -1)]
    if pattern == "first":
        return shown[:1]
    return [s for s in shown if ids[s] in (DELIMITERS if pattern == "delimiter" else PERIODS)]


def loss_of(part: GuidedAttention, patterns: tuple[str, ...], x: Tensor, around: Tokens) -> Tensor:
    """sum_h ||A_h - P_h||_F^2, the mean over the batch."""
    assert part.k is not None
    q, k = ((x @ linear.weight.mT).unflatten(-1, (HEADS, -1)) for linear in (part.q, part.k))
    total = torch.zeros((), dtype=x.dtype)
    for b in range(len(x)):
        documents = [0] * LENGTH if around.documents is None else around.documents[b].tolist()
        for h, pattern in enumerate(patterns):
            for t in range(LENGTH):
                shown = [s for s in range(LENGTH) if documents[s] == documents[t] and (s <= t or not part.causal)]
                wanted = row(pattern, t, shown, around.ids[b].tolist())
                if not wanted:
                    continue
                weights = (k[b, shown, h] @ q[b, t, h] / math.sqrt(WIDTH / HEADS)).softmax(0)
                goal = torch.tensor([1 / len(wanted) if s in wanted else 0.0 for s in shown], dtype=x.dtype)
                total = total + (weights - goal).square().sum()
    return total / len(x)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("causal", "patterns"),
    [(True, ("previous", "first", "period")), (False, ("next", "previous", "delimiter", "first"))],
)
def test_the_loss_is_the_papers(causal: bool, patterns: tuple[str, ...], documents: bool) -> None:
    part, x = mixer(*patterns, causal=causal, guidance_weight=0.6), drawn(2, LENGTH, WIDTH).requires_grad_()
    numbers = torch.tensor([[0] * 9 + [1] * 15, [0] * 14 + [1] * 10])
    around = tokens(LENGTH, documents=numbers if documents else None)
    assert part.k is not None
    leaves = [x, part.q.weight, part.k.weight]
    plain, with_loss = (
        torch.autograd.grad(part(x, around.with_forward(aux_loss_weight=weight)).sum(), leaves)
        for weight in (None, 0.25)
    )
    wanted = torch.autograd.grad(0.25 * 0.6 * loss_of(part, patterns, x, around), leaves)
    for before, after, extra in zip(plain, with_loss, wanted, strict=True):
        assert extra.any()
        assert close(after - before, extra)


def test_the_weight_falls_linearly_to_zero() -> None:
    part, x = mixer("previous", guidance_weight=0.6, guidance_until=0.5), drawn(2, LENGTH, WIDTH).requires_grad_()
    leaves = [x, part.q.weight]

    def added(progress: float | None) -> list[Tensor]:
        around = tokens(LENGTH).with_forward(progress=progress)
        out, plain = (part(x, around.with_forward(aux_loss_weight=weight)).sum() for weight in (0.25, None))
        pairs = zip(*(torch.autograd.grad(y, leaves) for y in (out, plain)), strict=True)
        return [after - before for after, before in pairs]

    whole = torch.autograd.grad(0.25 * 0.6 * loss_of(part, ("previous",), x, tokens(LENGTH)), leaves)
    for progress, fraction in ((None, 1.0), (0.0, 1.0), (0.125, 0.75), (0.4, 0.2), (0.5, 0.0), (0.9, 0.0)):
        for gradient, full in zip(added(progress), whole, strict=True):
            assert close(gradient, fraction * full)


def test_its_outputs_are_those_of_attention() -> None:
    part, plain = mixer("previous"), ready(Attention(Attention.Config(heads=HEADS), dims(length=LENGTH)))
    x = drawn(2, LENGTH, WIDTH)
    for weight in (None, 0.5):
        around = tokens(LENGTH).with_forward(aux_loss_weight=weight)
        assert torch.equal(part(x, around), plain(x, around))


def test_training_follows_the_pattern() -> None:
    patterns = ("previous", "delimiter", "first", "period")
    part, x = mixer(*patterns), drawn(2, LENGTH, WIDTH)
    around = tokens(LENGTH).with_forward(aux_loss_weight=1.0)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.05)
    before = loss_of(part, patterns, x, around).item()
    for _ in range(30):
        optimizer.zero_grad()
        (0.0 * part(x, around).sum()).backward()
        optimizer.step()
    assert loss_of(part, patterns, x, around).item() < 0.6 * before


def refused(*patterns: str, causal: bool = True, **settings: Any) -> list[str]:
    config = GuidedAttention.Config.model_validate({**SETTINGS, "patterns": patterns, **settings})
    return [str(problem) for problem in GuidedAttention.check(config, dims(length=LENGTH, causal=causal), "mixer")]


def test_bad_patterns_are_refused_with_what_would_work() -> None:
    (problem,) = refused("previous", "next")
    assert "'next' guides to later tokens, which a causal model hides" in problem
    assert "Take [previous]" in problem
    assert refused("previous", "next", causal=False) == []
    (problem,) = refused(*["first"] * 5)
    assert "5 patterns are more than heads=4" in problem
    (problem,) = refused("period", period_ids=())
    assert problem.startswith("mixer.period_ids: the pattern 'period' has no token ids")
    (problem,) = refused("delimiter", delimiter_ids=(3, 40))
    assert "40 is no token id of a vocabulary of 40" in problem
    (problem,) = refused("first", core={"kind": "linear"})
    assert "cannot hold the core 'linear'" in problem
