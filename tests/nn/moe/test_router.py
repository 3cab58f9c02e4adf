"""Each router against its paper written out literally, and what every router of the family promises."""

import pytest
import torch
from torch import Tensor

from tests.nn.moe import literal
from tests.nn.moe.mixture import D, V, router, sample
from xscale.core.config import decode, encode
from xscale.nn.ffn.moe.router.router import ROUTERS, RouterDims
from xscale.nn.ffn.moe.router.sinkhorn import balance_by_sinkhorn
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.tokens import Tokens

EXPERTS = 4


def sent(routing: Routing) -> literal.Sent:
    keep = torch.ones_like(routing.token, dtype=torch.bool) if routing.kept is None else routing.kept
    pairs = zip(routing.token[keep].tolist(), routing.expert[keep].tolist(), strict=True)
    return dict(zip(pairs, routing.weight[keep].tolist(), strict=True))


def same(got: literal.Sent, wanted: literal.Sent) -> bool:
    return got.keys() == wanted.keys() and all(got[key] == pytest.approx(wanted[key], abs=1e-12) for key in wanted)


def route(kind: str, tokens: Tokens, x: Tensor, experts: int = EXPERTS, groups: int = 1, **data: object) -> tuple:
    part = router(kind, experts, groups, **data)
    return part, part(x.flatten(0, 1), tokens)


def test_switch() -> None:
    x, tokens = sample()
    part, routing = route("switch", tokens, x)
    wanted, loss = literal.switch(x.flatten(0, 1), part.weight)
    assert same(sent(routing), wanted)
    assert routing.stats["aux"].item() == pytest.approx(loss, abs=1e-6)
    assert routing.loss.item() == pytest.approx(0.01 * loss, abs=1e-8)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_topk_is_a_softmax_over_the_chosen(k: int) -> None:
    x, tokens = sample()
    part, routing = route("topk", tokens, x, top_k=k)
    assert same(sent(routing), literal.mixtral(x.flatten(0, 1), part.weight, k))
    with pytest.raises(AssertionError):
        assert same(sent(routing), literal.mixtral(x.flatten(0, 1), -part.weight, k)), "the other end"


def test_a_bias_of_the_logits_is_one_more_input() -> None:
    """W x + b is the map of x and a 1 by W and b."""
    x, tokens = sample()
    part, _ = route("topk", tokens, x, logit_bias=True)
    with torch.no_grad():
        part.logit_bias.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    rows = x.flatten(0, 1)
    routing = part(rows, tokens)
    weight = torch.cat((part.weight, part.logit_bias[:, None]), 1)
    assert same(sent(routing), literal.mixtral(torch.cat((rows, torch.ones(len(rows), 1)), 1), weight, 2))
    assert not same(sent(routing), literal.mixtral(rows, part.weight, 2))
    (gradient,) = torch.autograd.grad(routing.weight.square().sum(), part.logit_bias)
    assert gradient.any()


def test_z_loss() -> None:
    x, tokens = sample()
    part, routing = route("topk", tokens, x, z_loss_weight=0.001, aux_loss_weight=0.0)
    rows = literal.scores(x.flatten(0, 1), part.weight)
    wanted = sum(torch.tensor(row, dtype=torch.float64).exp().sum().log().item() ** 2 for row in rows) / len(rows)
    assert routing.stats["z"].item() == pytest.approx(wanted)
    assert routing.loss.item() == pytest.approx(0.001 * wanted)


def test_group_limited_with_bias() -> None:
    x, tokens = sample()
    gates = {"score": "sigmoid", "scale": 2.5, "bias_update_rate": 0.001}
    part = router("group_limited", 8, top_k=3, expert_groups=4, topk_groups=2, group_score="top2", **gates)
    part.bias.copy_(torch.linspace(-0.3, 0.3, 8))
    routing = part(x.flatten(0, 1), tokens)
    wanted = literal.deepseek_v3(x.flatten(0, 1), part.weight, part.bias.tolist(), 3, 4, 2, 2.5)
    assert same(sent(routing), wanted)
    assert not same(sent(routing), literal.deepseek_v3(x.flatten(0, 1), part.weight, [0.0] * 8, 3, 4, 2, 2.5))
    groups = (routing.expert // 2).view(3, -1)
    assert max(len(set(column)) for column in groups.t().tolist()) <= 2


@pytest.mark.parametrize("groups", [1, 3])
def test_gshard(groups: int) -> None:
    x, tokens = sample(rng_seed=1)
    part = router("gshard", EXPERTS, groups)
    torch.manual_seed(5)
    routing = part(x.flatten(0, 1), tokens)
    torch.manual_seed(5)
    drawn = torch.rand(x.shape[0] * x.shape[1], dtype=torch.float64).tolist()
    wanted, loss = literal.gshard(x.flatten(0, 1), part.weight, groups, 10**6, drawn)
    assert same(sent(routing), wanted)
    assert len(wanted) < 2 * len(drawn), "no second expert was left out, so nothing was tested"
    assert routing.stats["aux"].item() == pytest.approx(EXPERTS**2 * loss, abs=1e-6)
    part.eval()
    assert part(x.flatten(0, 1), tokens).kept is None


def test_noisy_topk() -> None:
    x, tokens = sample(rng_seed=1)
    part = router("noisy_topk", EXPERTS, top_k=2)
    torch.nn.init.normal_(part.noise, std=0.3)
    torch.manual_seed(5)
    routing = part(x.flatten(0, 1), tokens)
    torch.manual_seed(5)
    normal = torch.randn(x.shape[0] * x.shape[1], EXPERTS, dtype=torch.float64).tolist()
    wanted, importance, load = literal.noisy_topk(x.flatten(0, 1), part.weight, part.noise, normal, 2)
    assert same(sent(routing), wanted)
    assert routing.stats["importance"].item() == pytest.approx(importance)
    assert routing.stats["load_loss"].item() == pytest.approx(load)
    assert routing.loss.item() == pytest.approx(0.1 * importance + 0.1 * load)


def test_expert_choice() -> None:
    x, tokens = sample()
    part, routing = route("expert_choice", tokens, x, capacity_factor=1.5)
    assert same(sent(routing), literal.expert_choice(x.flatten(0, 1), part.weight, 1.5))
    assert len(set(routing.expert.bincount().tolist())) == 1


def test_expert_choice_within_each_sequence() -> None:
    x, tokens = sample()
    part, routing = route("expert_choice", tokens, x, input_batch="sequence")
    wanted = {}
    for row in range(len(x)):
        one = literal.expert_choice(x[row], part.weight, 2.0)
        wanted |= {(token + row * x.shape[1], expert): weight for (token, expert), weight in one.items()}
    assert same(sent(routing), wanted)


def test_prototype() -> None:
    x, tokens = sample()
    part, routing = route("prototype", tokens, x, prototypes=2)
    assert same(sent(routing), literal.prototype(x.flatten(0, 1), part.weight, 2))
    torch.testing.assert_close(routing.probabilities.sum(1), torch.ones(48, dtype=torch.float64))


def test_sinkhorn() -> None:
    x, tokens = sample()
    part, routing = route("sinkhorn", tokens, x, iterations=7)
    assert same(sent(routing), literal.sinkhorn(x.flatten(0, 1), part.weight, 7))
    part.eval()
    assert sent(part(x.flatten(0, 1), tokens)).keys() == literal.switch(x.flatten(0, 1), part.weight)[0].keys()


def test_sinkhorn_evens_a_skewed_load() -> None:
    logits = torch.randn(400, 8, dtype=torch.float64) + torch.arange(8)
    skewed = logits.argmax(1).bincount(minlength=8).max()
    evened = balance_by_sinkhorn(logits, 30).argmax(1).bincount(minlength=8).max()
    assert skewed > 150
    assert evened < 100


def test_base_fills_every_expert_alike_at_the_highest_total() -> None:
    x, tokens = sample()
    part, routing = route("base_layer", tokens, x)
    rows = literal.scores(x.flatten(0, 1), part.weight)
    chosen = dict(sent(routing).keys())
    assert routing.expert.bincount().tolist() == [12] * 4
    total = sum(rows[token][expert] for token, expert in chosen.items())
    # Twelve copies of each expert make the table square.
    assert total == pytest.approx(literal.hungarian([[value for value in row for _ in range(12)] for row in rows]))
    assert all(
        weight == pytest.approx(literal.sigmoid(rows[token][expert]))
        for (token, expert), weight in sent(routing).items()
    )
    part.eval()
    assert sent(part(x.flatten(0, 1), tokens)).keys() == literal.switch(x.flatten(0, 1), part.weight)[0].keys()


def test_forced_deals_the_experts_out() -> None:
    x, tokens = sample()
    _, routing = route("round_robin", tokens, x)
    assert routing.expert.bincount().tolist() == [24] * 4
    _, routing = route("round_robin", tokens, x, active_experts=2)
    assert routing.expert.bincount(minlength=4).tolist() == [48, 48, 0, 0]


def test_random_draws_anew_in_training_and_is_fixed_outside() -> None:
    x, tokens = sample(rows=20, rng_seed=1)
    part = router("random", EXPERTS)
    flat = x.flatten(0, 1)
    first, second = part(flat, tokens), part(flat, tokens)
    assert not torch.equal(first.expert, second.expert)
    assert all(len(set(pair)) == 2 for pair in first.expert.view(2, -1).t().tolist())
    part.eval()
    first, second = part(flat, tokens), part(flat, tokens)
    assert torch.equal(first.expert, second.expert)
    assert first.expert.bincount().min() > 180, "of 240 on average"


@pytest.mark.parametrize("entry", list(ROUTERS), ids=lambda entry: entry.name)
class TestFamily:
    """Traits hold for each router; no router is named."""

    def test_config_is_data(self, entry) -> None:
        config = entry.part.Config()
        data = encode(config)
        assert data.pop("kind") == entry.name
        assert decode(entry.part.Config, data) == config

    def test_assignments_are_in_range_and_differentiable(self, entry) -> None:
        x, tokens = sample(rng_seed=1)
        part = router(entry.name)
        routing = part(x.flatten(0, 1).requires_grad_(), tokens)
        assert routing.token.min() >= 0
        assert routing.token.max() < 48
        assert routing.expert.min() >= 0
        assert routing.expert.max() < EXPERTS
        assert routing.probabilities.shape == (48, EXPERTS)
        torch.testing.assert_close(routing.probabilities.sum(1), torch.ones(48, dtype=torch.float64))
        assert routing.weight.requires_grad == entry.traits.learned
        assert len(routing.token) == round(part.experts_per_token(entry.part.Config(), EXPERTS) * 48)
        if entry.traits.top_k is not None:
            assert routing.k == entry.traits.top_k
        pairs = list(zip(routing.token.tolist(), routing.expert.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs), "a token was sent to one expert twice"

    def test_causal(self, entry) -> None:
        """A later token changes its routing just where the traits say so."""
        x, tokens = sample(rows=1)
        part = router(entry.name)
        changed = x.clone()
        changed[:, 12:] = -3 * changed[:, 12:]
        before = {k: v for k, v in sent(part(x.flatten(0, 1), tokens)).items() if k[0] < 12}
        after = {k: v for k, v in sent(part(changed.flatten(0, 1), tokens)).items() if k[0] < 12}
        assert (before == after) == entry.traits.causal

    def test_capacity_is_respected_by_those_that_never_drop(self, entry) -> None:
        x, tokens = sample()
        skewed = x + 3 * torch.ones_like(x)
        loads = router(entry.name)(skewed.flatten(0, 1), tokens).expert.bincount(minlength=EXPERTS)
        even = len(tokens.ids.flatten()) * router(entry.name).experts_per_token(entry.part.Config(), EXPERTS) / EXPERTS
        if not entry.traits.drops:
            assert loads.max() <= even

    def test_bad_input_is_refused(self, entry) -> None:
        sizes = RouterDims(D, 1, V, 1, None)
        if "top_k" in entry.part.Config.model_fields:
            problems = entry.part.check(entry.part.Config(top_k=3), sizes, "router")
            assert any("top_k" in problem.path and problem.advice for problem in problems)
            assert not entry.part.check(entry.part.Config(top_k=1), RouterDims(D, 8, V, 1, None), "router")


@pytest.mark.parametrize("entry", [one for one in ROUTERS if one.traits.scope == "token"], ids=lambda one: one.name)
def test_scope(entry) -> None:
    """A permutation of the batch permutes the routing of routers that look at one token."""
    x, tokens = sample()
    part = router(entry.name).eval()
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    moved = Tokens(*(one.flatten()[order].view(2, 24) for one in (tokens.ids, tokens.positions)))
    routing, permuted = part(x.flatten(0, 1), tokens), part(x.flatten(0, 1)[order], moved)
    place = {int(old): new for new, old in enumerate(order)}
    assert sent(permuted) == {(place[t], e): w for (t, e), w in sent(routing).items()}


@pytest.mark.parametrize("entry", [one for one in ROUTERS if one.traits.balance == "loss"], ids=lambda one: one.name)
def test_balance_falls_under_its_own_loss(entry) -> None:
    x, tokens = sample(rows=8, rng_seed=1)
    x = x + 2 * torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    part = router(entry.name, 8)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.03)

    def unevenness() -> float:
        load = part.eval()(x.flatten(0, 1), tokens).expert.bincount(minlength=8).double()
        return float(load.std() / load.mean())

    start = unevenness()
    for _ in range(150):
        optimizer.zero_grad()
        part.train()(x.flatten(0, 1), tokens).loss.backward()
        optimizer.step()
    assert unevenness() < 0.6 * start
