"""Adaptive computation time and the signals of a Universal Transformer, against the equations written out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, ready
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Stats, Tokens

VOCABULARY, LENGTH, DEPTH, EPSILON, PONDER = 17, 9, 5, 0.05, 0.3
BLOCK: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 2},
    "ffn": {"kind": "dense", "hidden": 20},
    "norm": "layer",
    "residual": "post",
}


def model(kind: type[Any] = Decoder, *, bias: float | None = None, **stack: Any) -> Any:
    """A Universal Transformer; `bias` sets the halting unit's."""
    settings = {"depth": DEPTH, "block": BLOCK, "share": "all", "step_signal": True, **stack}
    settings.setdefault("halting", {"epsilon": EPSILON, "ponder_weight": PONDER, "bias": -0.5})
    stacks = {"encoder": settings, "decoder": settings} if kind is EncoderDecoder else {"stack": settings}
    config = decode(kind.Config, {"width": 12, "position": "none", **stacks})
    assert kind.check(config, (VOCABULARY, LENGTH), "model") == []
    made = ready(kind(config, VOCABULARY, LENGTH))
    if bias is not None:
        made.stack.halting.weight.data.zero_()
        made.stack.halting.bias.data.fill_(bias)
    return made


def tokens(**others: Any) -> Tokens:
    return Tokens.from_ids(torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)), **others)


def signal(position: int, step: int, width: int) -> Tensor:
    values = []
    for channel in range(width):
        rate = 10000 ** (2 * (channel // 2) / width)
        wave = math.cos if channel % 2 else math.sin
        values.append(wave(position / rate) + wave(step / rate))
    return torch.tensor(values, dtype=torch.float64)


def stepped(stack: Any, x: Tensor, about: Tokens, step: int) -> Tensor:
    """The states after a step, by the stack's one block."""
    signals = torch.stack([signal(place, step, x.shape[-1]) for place in range(x.shape[1])])
    x = x + signals
    for sublayer in (stack.shared.mixer, stack.shared.ffn):
        x = sublayer(x, about)
    return x


def literal(stack: Any, x: Tensor, about: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, ponder costs and steps, token by token."""
    unit = stack.halting
    batch, length, _ = x.shape
    places = [(row, at) for row in range(batch) for at in range(length)]
    spent = {place: [] for place in places}  # type: ignore[var-annotated]
    outputs: dict[Any, Any] = dict.fromkeys(places, 0.0)
    costs: dict[Any, Any] = {}
    for step in range(1, DEPTH + 1):
        after = stepped(stack, x, about, step)
        rows = []
        for row, at in places:
            if (row, at) in costs:
                rows.append(x[row, at])
                continue
            state = after[row, at]
            rows.append(state)
            p = torch.sigmoid(unit.weight[0] @ state + unit.bias[0])
            so_far = sum(spent[row, at], torch.zeros((), dtype=p.dtype))
            if float((so_far + p).detach()) >= 1 - EPSILON or step == DEPTH:
                outputs[row, at] = outputs[row, at] + (1 - so_far) * state
                costs[row, at] = step + 1 - so_far
            else:
                outputs[row, at] = outputs[row, at] + p * state
                spent[row, at].append(p)
        x = torch.stack(rows).view_as(x)
    cost = torch.stack([costs[place] for place in places])
    steps = torch.tensor([1.0 + len(spent[place]) for place in places])
    return torch.stack([outputs[place] for place in places]).view_as(x), cost, steps


def test_a_token_is_stepped_until_its_probability_is_spent() -> None:
    made = model()
    x, stats = made.embed(tokens()).detach(), Stats()
    out = made.stack(x, tokens(aux_loss_weight=0.7, stats=stats))
    wanted, cost, steps = literal(made.stack, x, tokens())
    assert steps.min() < steps.max(), "tokens halt at different steps"
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6), "sinusoids are in single precision"
    assert math.isclose(float(stats.means()["stack.halting/steps"]), float(steps.mean()), rel_tol=1e-6)
    weights = drawn(*out.shape)
    parameters = dict(made.stack.named_parameters())
    gradients = torch.autograd.grad((out * weights).sum(), list(parameters.values()))
    loss = (wanted * weights).sum() + 0.7 * PONDER * cost.mean()
    for name, gradient, right in zip(
        parameters, gradients, torch.autograd.grad(loss, list(parameters.values())), strict=True
    ):
        assert torch.allclose(gradient, right, rtol=1e-4, atol=1e-5), name


def test_a_token_that_halts_at_once_has_the_first_state() -> None:
    made = model(bias=30.0)
    x = made.embed(tokens())
    assert torch.allclose(made.stack(x, tokens()), stepped(made.stack, x, tokens(), 1), rtol=1e-5, atol=1e-6)


def test_a_token_that_never_halts_has_the_last_state() -> None:
    made = model(bias=-60.0)
    plain = model(halting=None)
    plain.load_state_dict({name: value for name, value in made.state_dict().items() if "halting" not in name})
    assert close(made(tokens()), plain(tokens()))


@pytest.mark.parametrize("count", [1, 3, DEPTH])
def test_halting_that_is_forced_at_a_step_is_that_many_layers(count: int) -> None:
    made, plain = model(bias=0.0), model(halting=None, depth=count)
    plain.load_state_dict({name: value for name, value in made.state_dict().items() if "halting" not in name})
    unit, step = made.stack.halting, 0

    def force(parameter: Tensor) -> Tensor:
        nonlocal step
        if parameter is not unit.bias:
            return parameter
        step += 1
        return torch.full_like(parameter, 60.0 if step == count else -60.0)

    unit.use = force
    assert close(made(tokens()), plain(tokens()))
    assert step == DEPTH


@pytest.mark.parametrize("kind", [Decoder, EncoderDecoder])
def test_decoding_over_a_cache_is_the_parallel_form(kind: type[Any]) -> None:
    made, ids = model(kind), tokens().ids
    source = {"source": tokens()} if kind is EncoderDecoder else {}
    whole, rows = made(tokens(), **source), []
    cache: dict[str, Any] = {}
    for first, last in [(0, 4), (4, 5), (5, 9)]:
        positions = torch.arange(first, last).expand(2, -1)
        rows.append(made(Tokens(ids=ids[:, first:last], positions=positions, forward=Forward(cache=cache)), **source))
    assert close(torch.cat(rows, 1), whole)


def test_later_tokens_do_not_change_when_a_token_halts() -> None:
    made, about = model(), tokens()
    x = made.embed(about).detach()
    changed = x.clone()
    changed[:, 5:] += 1
    assert close(made.stack(changed, about)[:, :5], made.stack(x, about)[:, :5])


def test_what_cannot_be_stepped_is_refused() -> None:
    def problems(width: int, **stack: Any) -> str:
        config = decode(Decoder.Config, {"width": width, "position": "none", "stack": {"depth": 2, **stack}})
        return " ".join(map(str, Decoder.check(config, (VOCABULARY, LENGTH), "model")))

    block = {**BLOCK, "mixer": {"kind": "attention", "heads": 3, "head_width": 4}}
    assert "width=9 is odd" in problems(9, block=block, step_signal=True)
    prior = {**BLOCK, "mixer": {"kind": "attention", "heads": 2, "core": "prior_scores"}}
    assert "has no scores to hand on" in problems(12, block=prior, halting={})
