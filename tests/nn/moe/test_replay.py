"""Router replay in one mixture: given experts are used, and losses and statistics are of those that it would choose."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.moe.mixture import config_of, dims, mixture, sample
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.replay import RECORDER, ROUTE_WEIGHTS, ROUTES
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.signals import Signal
from xscale.nn.tokens import Stats, Tokens

BY_TOKEN = [name for name in ROUTERS.names() if ROUTERS.get(name).traits.choice == "token"]
E = 4


class Recorded:
    """The routes of one mixture."""

    def __init__(self) -> None:
        self.experts: list[Tensor] = []
        self.weights: list[Tensor] = []

    def add(self, layer: int, experts: Tensor, weights: Tensor) -> None:
        assert layer == 1
        self.experts.append(experts)
        self.weights.append(weights)


def built(kind: str, weights: str = "recomputed", **data: Any) -> Moe:
    top_k = {"top_k": 2} if kind == "noisy_topk" else {}
    moe = mixture(experts=E, router={"kind": kind, **top_k}, replay={"file": "routes", "weights": weights}, **data)
    for parameter in moe.router.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    moe.number_routes(1)
    return moe


def passed(moe: Moe, x: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output, gradients and statistics."""
    stats = Stats()
    torch.manual_seed(0)
    moe.zero_grad()
    x = x.clone().requires_grad_()
    y = moe(x, tokens.with_forward(stats=stats))
    y.square().sum().backward()
    assert x.grad is not None
    learnt = {name: one.grad.clone() for name, one in moe.named_parameters() if one.grad is not None}
    return y.detach(), {**learnt, "x": x.grad}, stats.means()


def given(experts: Tensor, weights: Tensor | None, x: Tensor) -> dict[Signal[Any], Tensor]:
    """Signals with the routes [N, k] of layer 1; layer 0 has others."""
    routes = torch.stack([torch.ones_like(experts), experts + 1], 1).view(*x.shape[:2], 2, -1)
    signals: dict[Signal[Any], Tensor] = {ROUTES: routes.to(torch.uint8)}
    if weights is not None:
        signals[ROUTE_WEIGHTS] = torch.stack([weights, weights], 1).view(routes.shape)
    return signals


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", BY_TOKEN)
def test_its_own_routes_change_nothing(kind: str, training: bool, capacity: float | None) -> None:
    moe = built(kind, capacity_factor=capacity).train(training)
    x, tokens = sample(rng_seed=1 if kind != "gshard" else None)
    recorded = Recorded()
    y, learnt, stats = passed(moe, x, tokens.with_signals({RECORDER: recorded}))
    replayed, learnt_again, again = passed(moe, x, tokens.with_signals(given(recorded.experts[0], None, x)))
    assert torch.equal(y, replayed)
    assert learnt.keys() == learnt_again.keys()
    for name, value in learnt.items():
        torch.testing.assert_close(learnt_again[name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert again.pop(f"{moe.path}/replaced") == 0
    # Without a replay and without a capacity the rows of the experts are the load.
    rows = stats.pop(f"{moe.path}/rows", stats[f"{moe.path}/load"])
    torch.testing.assert_close(again.pop(f"{moe.path}/rows"), rows)
    assert stats.keys() == again.keys()
    for name, value in stats.items():
        torch.testing.assert_close(again[name], value, msg=name)


@pytest.mark.parametrize("kind", BY_TOKEN)
def test_given_experts_are_used_and_the_statistics_are_of_its_own(kind: str) -> None:
    moe = built(kind)
    x, tokens = sample(rng_seed=1)
    recorded = Recorded()
    y, _, stats = passed(moe, x, tokens.with_signals({RECORDER: recorded}))
    own = recorded.experts[0]
    k = own.shape[1]
    others = (own + 1) % E
    others[::3] = own[::3]
    replaying = Recorded()
    signals = {**given(others, None, x), RECORDER: replaying}
    replayed, _, again = passed(moe, x, tokens.with_signals(signals))
    weights = replaying.weights[0]
    assert torch.equal(replaying.experts[0], others)
    flat = x.flatten(0, 1)
    outputs = torch.stack(
        [moe.experts(flat, torch.tensor([len(flat) if e == one else 0 for e in range(E)]), None) for one in range(E)], 1
    )  # [N, E, D]
    expected = (weights[..., None] * outputs.gather(1, others[..., None].expand(-1, k, x.shape[2]))).sum(1)
    torch.testing.assert_close(replayed, expected.view(x.shape), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(replayed, y)
    differs = (own.sort(1).values != others.sort(1).values).any(1)
    replaced = again.pop(f"{moe.path}/replaced").item()
    if kind == "gshard":
        # It would have dropped some of the second experts, which are used here.
        assert replaced >= differs.double().mean().item()
    else:
        assert replaced == pytest.approx(differs.double().mean().item())
    for name, value in stats.items():
        if not name.endswith("dropped"):
            torch.testing.assert_close(again[name], value, msg=name)


def test_weights_of_given_experts_are_softmax_over_them() -> None:
    """Written down for topk: the gates of the given experts, divided by their sum."""
    moe = built("topk")
    x, tokens = sample()
    experts = torch.tensor([[3, 0]]).expand(x.shape[0] * x.shape[1], -1)
    recorder = Recorded()
    passed(moe, x, tokens.with_signals({**given(experts, None, x), RECORDER: recorder}))
    logits = x.flatten(0, 1) @ moe.router.weight.detach().T
    torch.testing.assert_close(recorder.weights[0], logits[:, [3, 0]].softmax(1))


def test_recorded_weights_have_the_values_of_the_file_and_the_gradient_of_the_scores() -> None:
    moe, recomputing = built("topk", "recorded"), built("topk")
    x, tokens = sample()
    experts = torch.tensor([[3, 0]]).expand(x.shape[0] * x.shape[1], -1)
    weights = torch.rand(experts.shape, dtype=torch.float64)
    recorder = Recorded()
    signals = {**given(experts, None, x), RECORDER: recorder}
    _, learnt, _ = passed(recomputing, x, tokens.with_signals(signals))
    same = given(experts, recorder.weights[0], x)
    _, learnt_with_same, _ = passed(moe, x, tokens.with_signals(same))
    for name, value in learnt.items():
        torch.testing.assert_close(learnt_with_same[name], value, rtol=1e-12, atol=1e-14, msg=name)
    y, learnt, _ = passed(moe, x, tokens.with_signals(given(experts, weights, x)))
    doubled, learnt_doubled, _ = passed(moe, x, tokens.with_signals(given(experts, 2 * weights, x)))
    torch.testing.assert_close(doubled, 2 * y)
    assert learnt_doubled["router.weight"].abs().sum() > 0


def test_padding_keeps_the_choice_of_the_router() -> None:
    moe = built("topk", capacity_factor=None)
    x, tokens = sample()
    padding = torch.zeros(tokens.ids.shape, dtype=torch.bool)
    padding[1, 15:] = True
    padded = Tokens.from_ids(tokens.ids, padding=padding, aux_loss_weight=1.0)
    experts = torch.tensor([[3, 0]]).expand(x.shape[0] * x.shape[1], -1)
    recorder = Recorded()
    y, _, _ = passed(moe, x, padded.with_signals({**given(experts, None, x), RECORDER: recorder}))
    assert recorder.experts[0].shape == (int((~padding).sum()), 2)
    assert (recorder.experts[0] == torch.tensor([3, 0])).all()
    full, _, _ = passed(moe, x, tokens.with_signals(given(experts, None, x)))
    torch.testing.assert_close(y[~padding], full[~padding])


def test_one_changed_id_is_seen() -> None:
    """Negative control."""
    moe = built("topk")
    x, tokens = sample()
    recorded = Recorded()
    y, _, _ = passed(moe, x, tokens.with_signals({RECORDER: recorded}))
    experts = recorded.experts[0].clone()
    unused = next(e for e in range(E) if e not in experts[7].tolist())
    experts[7, 1] = unused
    changed, _, stats = passed(moe, x, tokens.with_signals(given(experts, None, x)))
    differs = (changed != y).flatten(0, 1).any(1).nonzero().flatten().tolist()
    assert differs == [7]
    assert stats[f"{moe.path}/replaced"].item() == pytest.approx(1 / len(experts))


def test_experts_that_choose_tokens_are_refused() -> None:
    config: Any = config_of("moe", router={"kind": "expert_choice"}, replay={"file": "routes"})
    (problem,) = Moe.check(config, dims(), "ffn")
    assert problem.path == "ffn.replay"
    assert "the experts of 'expert_choice' choose their tokens" in str(problem)
