"""Sorting and dropping against a loop that hands out places one by one."""

import pytest
import torch

from tests.nn.moe.mixture import mixture, sample
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.permutation import DropPolicy, experts_of_rows, plan_dispatch
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.ffn.moe.segments import Segments
from xscale.nn.tokens import Stats

E, N, K = 4, 24, 2


def routing_of(seed: int = 0, choices: int = K, expert: int | None = None) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    skew = torch.tensor([1.0, 0.5, 0.0, 0.0])
    probabilities = (torch.randn(N, E, generator=generator) + skew).softmax(1)
    weights, experts = probabilities.topk(choices, dim=1)
    if expert is not None:
        experts = torch.full_like(experts, expert)
    kept = torch.rand(N, choices, generator=generator) > 0.2
    kept[:, 0] = True
    return Routing.from_topk(experts, weights, probabilities, kept=kept)


def by_hand(routing: Routing, capacity: int, drop_policy: DropPolicy, groups: int) -> set[int]:
    """Assignments that are kept, by a loop that fills one slot at a time."""
    tokens = len(routing.probabilities)
    best = routing.probabilities.amax(1).tolist()
    size = -(-tokens // groups)

    def precedence(assignment: int) -> tuple[float, ...]:
        token, choice = int(routing.token[assignment]), assignment // tokens
        return {
            "position": (token, choice),
            "choice": (choice, token),
            "probability": (-float(routing.weight[assignment]), assignment),
            "priority": (choice, -best[token], token),
        }[drop_policy]

    used: dict[tuple[int, int], int] = {}
    kept = set()
    for assignment in sorted(range(len(routing.token)), key=precedence):
        slot = int(routing.token[assignment]) // size, int(routing.expert[assignment])
        if routing.kept is not None and not routing.kept[assignment]:
            continue
        used[slot] = used.get(slot, 0) + 1
        if used[slot] <= capacity:
            kept.add(assignment)
    return kept


@pytest.mark.parametrize("drop_policy", ["position", "choice", "probability", "priority"])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("choices", [1, 2])
def test_every_policy(drop_policy: DropPolicy, groups: int, choices: int) -> None:
    routing = routing_of(choices=choices)
    capacity = {1: 5, 2: 3, 5: 1}[groups]
    got = plan_dispatch(routing, E, capacity, drop_policy, Segments.even(N, groups))
    kept = by_hand(routing, capacity, drop_policy, groups)
    assert 0 < len(kept) < int(routing.kept.sum()), "nothing was dropped, so nothing was tested"
    experts = torch.arange(E).repeat_interleave(got.tokens_per_expert).tolist()
    rows = zip(got.tokens.tolist(), experts, got.weights.tolist(), strict=True)
    every = zip(routing.token.tolist(), routing.expert.tolist(), routing.weight.tolist(), strict=True)
    assert sorted(rows) == sorted(row for one, row in enumerate(every) if one in kept)
    assert got.load.tolist() == routing.expert[routing.kept].bincount(minlength=E).tolist()


def test_policies_differ() -> None:
    every: tuple[DropPolicy, ...] = ("position", "choice", "probability", "priority")
    assert len({frozenset(by_hand(routing_of(), 8, drop, 1)) for drop in every}) == 4


def test_dropless_keeps_every_assignment() -> None:
    routing = routing_of()
    got = plan_dispatch(routing, E, None, "position")
    assert got.tokens_per_expert.tolist() == got.load.tolist()
    assert len(got.tokens) == int(routing.kept.sum())


def test_all_tokens_to_one_expert() -> None:
    routing = routing_of(choices=1, expert=2)
    assert plan_dispatch(routing, E, None, "position").tokens_per_expert.tolist() == [0, 0, N, 0]
    got = plan_dispatch(routing, E, 7, "position")
    assert got.tokens_per_expert.tolist() == [0, 0, 7, 0]
    assert got.tokens.tolist() == list(range(7))


def test_one_token_and_one_expert() -> None:
    one = Routing.from_topk(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.ones(1, 1))
    got = plan_dispatch(one, 1, 1, "priority")
    assert (got.tokens.tolist(), got.tokens_per_expert.tolist()) == ([0], [1])


def test_position_never_drops_for_the_sake_of_what_comes_later() -> None:
    """Routings of a prefix keep what the routings of the whole keep of it; the policy by choice does not promise it."""

    def kept(drop_policy: DropPolicy, length: int) -> set[tuple[int, float]]:
        whole = routing_of()
        index = torch.arange(length)
        part = Routing.from_topk(
            whole.expert.view(K, N).t()[index], whole.weight.view(K, N).t()[index], whole.probabilities[index]
        )
        got = plan_dispatch(part, E, 5, drop_policy)
        return {(t, w) for t, w in zip(got.tokens.tolist(), got.weights.tolist(), strict=True) if t < 12}

    assert kept("position", 12) == kept("position", N)
    assert kept("choice", 12) != kept("choice", N)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("capacity", [None, 4])
def test_with_fixed_shapes_dropped_rows_come_last(capacity: int | None, groups: int) -> None:
    routing = routing_of()
    exact = plan_dispatch(routing, E, capacity, "position", Segments.even(N, groups))
    fixed = plan_dispatch(routing, E, capacity, "position", Segments.even(N, groups), fixed_shapes=True)
    assert fixed.token_rows is not None
    assert torch.equal(
        fixed.tokens[fixed.token_rows], torch.arange(len(fixed.token_rows))[:, None].expand(-1, routing.k)
    )
    assert torch.equal(fixed.token_rows.flatten().sort().values, torch.arange(len(fixed.tokens)))
    rows = len(exact.tokens)
    assert rows < len(fixed.tokens) == len(routing.token)
    assert torch.equal(fixed.tokens[:rows], exact.tokens)
    assert torch.equal(fixed.weights[:rows], exact.weights)
    assert not fixed.weights[rows:].any()
    assert torch.equal(fixed.tokens_per_expert, exact.tokens_per_expert)
    assert torch.equal(fixed.load, exact.load)
    experts = torch.arange(E).repeat_interleave(exact.tokens_per_expert)
    assert torch.equal(experts_of_rows(fixed.tokens_per_expert, len(fixed.tokens))[:rows], experts)


@pytest.mark.parametrize(
    "data",
    [
        {"router": {"kind": "switch"}, "capacity_factor": 0.5},
        {"router": {"kind": "topk", "top_k": 2}, "capacity_factor": 0.75, "capacity_groups": 2},
        {"router": {"kind": "gshard", "second_expert_policy": "random"}},
        {"router": {"kind": "switch"}, "capacity_factor": 0.5, "expert_dropout": 0.3},
    ],
    ids=["capacity", "groups", "router lets go", "dropout"],
)
def test_rows_of_dropped_assignments_change_nothing(data: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed shapes, as on a GPU: the same output, gradients and statistics, up to the order of sums."""
    results = []
    for fixed in (False, True):
        monkeypatch.setattr(Moe, "fixed_shapes", lambda self, flat, fixed=fixed: fixed)
        moe = mixture(seed=2, **data)
        x, tokens = sample(rng_seed=5, stats=Stats())
        x.requires_grad_()
        torch.manual_seed(0)
        y = moe(x, tokens)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        assert tokens.forward.stats is not None
        results.append([y, x.grad, *(p.grad for p in moe.parameters()), *tokens.forward.stats.means().values()])
    (dropped,) = (value for name, value in tokens.forward.stats.means().items() if name.endswith("dropped"))
    assert dropped > 0 or "capacity_factor" not in data
    for exact, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-11, atol=1e-13)
