"""Low-rank and local heads against the paper's two kinds of attention, one head and one pair of tokens at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.attention.entmax import Entmax
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.narrow_and_local import NarrowAndLocal
from xscale.nn.position.alibi import Alibi
from xscale.nn.position.rope import Rope
from xscale.nn.position.shaw import Shaw

LENGTH, HEADS, RANK, REACH = 14, 4, 3, 2
K = WIDTH // HEADS
BAND = {"kind": "block_sparse", "block": 4, "pattern": {"kind": "band", "left": REACH, "right": REACH}}


def config(**changes: Any) -> Any:
    return decode(NarrowAndLocal.Config, {"heads": HEADS, "narrow_width": RANK, "local": BAND, **changes})


def mixer(causal: bool, **changes: Any) -> NarrowAndLocal:
    around = dims(length=LENGTH, causal=causal)
    assert NarrowAndLocal.check(config(**changes), around, "mixer") == []
    return ready(NarrowAndLocal(config(**changes), around))


def literal(part: NarrowAndLocal, x: Tensor, turn: str, causal: bool) -> Tensor:
    """`turn` are the kinds of a turn's heads: R is low-rank, L local. Rows of the projections are read head by head."""
    heads, row = [], 0
    assert part.k is not None
    for head in range(HEADS):
        low_rank = turn[head % len(turn)] == "R"
        width = RANK if low_rank else K
        w_q, w_k = (linear.weight[row : row + width] for linear in (part.q, part.k))
        b_q, b_k = (linear.bias[row : row + width] for linear in (part.q, part.k))
        row += width
        rows = slice(head * K, (head + 1) * K)
        values = x @ part.v.weight[rows].mT + part.v.bias[rows]
        outputs = []
        for i in range(LENGTH):
            reach = range(LENGTH) if low_rank else range(max(0, i - REACH), min(LENGTH, i + REACH + 1))
            keys = [j for j in reach if j <= i or not causal]
            query = w_q @ x[i] + b_q
            scores = torch.stack([query @ (w_k @ x[j] + b_k) / math.sqrt(width) for j in keys])
            outputs.append(scores.softmax(0) @ values[keys])
        heads.append(torch.stack(outputs))
    assert row == len(part.q.weight) == len(part.k.weight)
    return torch.cat(heads, -1) @ part.o.weight.mT + part.o.bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("shares", "turn"), [((1, 1), "RL"), ((1, 3), "RLLL"), ((4, 4), "RL")])
def test_it_is_the_papers_two_kinds_of_attention(causal: bool, shares: tuple[int, int], turn: str) -> None:
    part, x = mixer(causal, shares=list(shares), bias=True), drawn(LENGTH, WIDTH).requires_grad_()
    out, wanted = part(x[None], tokens(LENGTH, batch=1))[0], literal(part, x, turn, causal)
    assert close(out, wanted)
    assert not close(out, literal(part, x, turn[::-1], causal))
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)


def test_scores_of_narrow_heads_have_a_low_rank_and_cost_less() -> None:
    part = mixer(False, shares=[1, 1])
    seen: list[Tensor] = []
    low_rank, local = part.core.cores
    low_rank.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[:2]))
    part(drawn(1, LENGTH, WIDTH), tokens(LENGTH, batch=1))
    assert [x.shape[-1] for x in seen] == [RANK, RANK]
    scores = seen[0] @ seen[1].mT
    assert torch.linalg.matrix_rank(scores).unique().tolist() == [RANK]
    spent = part.multiply_adds(LENGTH, LENGTH)
    assert spent == HEADS / 2 * LENGTH * LENGTH * (RANK + K) + local.multiply_adds(LENGTH, LENGTH, HEADS // 2, K)


def test_bad_settings_are_refused_with_what_would_work() -> None:
    def problem(around: Any = None, **changes: Any) -> str:
        (problem,) = NarrowAndLocal.check(config(**changes), around or dims(), "mixer")
        return str(problem)

    assert problem(heads=6).startswith("mixer.heads: heads=6 does not divide width=32")
    assert "mixer.narrow_width: narrow_width=8 is not low" in problem(narrow_width=8)
    assert "Take 7, or mixer.kind=attention. Lower values work too" in problem(narrow_width=8)
    assert problem(shares=[1, 2]).startswith("mixer.shares: heads=4 cannot be shared as 1 to 2")
    assert problem(local={"kind": "linformer"}).startswith("mixer.local: 'linformer' is not causal")
    assert problem(local={"kind": "prior_scores"}).startswith("mixer.local: 'prior_scores' hands its scores")
    assert problem(around=dims(position=Rope.Config())).startswith("model.position: position 'rope' acts on queries")
    scores = NarrowAndLocal.Config(heads=4, narrow_width=2, position=Shaw.Config())
    assert [p.path for p in NarrowAndLocal.check(scores, dims(), "mixer")] == ["mixer.position"]
    biased = NarrowAndLocal.Config(heads=4, narrow_width=2, position=Alibi.Config())
    assert NarrowAndLocal.check(biased, dims(), "mixer") == []
    entmax = NarrowAndLocal.Config(heads=4, narrow_width=2, local=Entmax.Config())
    assert NarrowAndLocal.check(entmax, dims(), "mixer") == []
    assert not isinstance(entmax, Attention.Config)
