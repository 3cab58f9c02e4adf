"""FLOATER: the solver against closed forms, the encodings against the paper's integral, and what blocks share."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.module import name_modules
from xscale.nn.position.floater import Floater, runge_kutta
from xscale.nn.tokens import SharedValues, Tokens
from xscale.parallel.precision.precision import apply

WIDTH, LENGTH, VOCABULARY = 6, 9, 17
TURN = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=torch.float64)
"""dp/dt = TURN p turns p by 2 radians in a unit of time."""


def turned(angle: float) -> Tensor:
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def error(steps: int) -> float:
    """The largest error of the linear equation over 2 units of time."""
    found = runge_kutta(lambda _, p: TURN @ p, turned(0.0), 0.0, 0.5, 5, steps)
    return max(float((found[at] - turned(2 * 0.5 * at)).norm()) for at in range(5))


def test_a_linear_equation_has_its_exponential() -> None:
    assert error(64) < 1e-7


@pytest.mark.parametrize("steps", [4, 8, 16])
def test_half_the_step_has_a_sixteenth_of_the_error(steps: int) -> None:
    assert error(steps) / error(2 * steps) == pytest.approx(16, rel=0.08)


def test_time_enters() -> None:
    """dp/dt = 4 t^3 p: the right side depends on time, and p(t) = p(1) exp(t^4 - 1)."""
    found = runge_kutta(lambda t, p: 4 * t**3 * p, torch.ones(1, dtype=torch.float64), 1.0, 0.1, 6, 20)
    for at in range(6):
        assert found[at].item() == pytest.approx(math.exp((1 + 0.1 * at) ** 4 - 1), rel=1e-6)


def part(**config: Any) -> Floater:
    return ready(Floater(Floater.Config(**{"interval": 0.1, **config}), dims(width=WIDTH, length=LENGTH)))


def literal(of: Floater, count: int, fine: int) -> Tensor:
    """p(0) and the sum of h(tau, p) dtau over midpoints of `fine` pieces between two positions: order 2."""
    net = of.layer_tables

    def h(time: float, p: Tensor) -> Tensor:
        hidden = net.up @ torch.cat((p, p.new_tensor([time]))) + net.up_bias
        return net.down @ torch.cat((hidden.clamp(min=0), p.new_tensor([time]))) + net.down_bias

    p: Tensor = of.initial
    out, dtau = [p], of.interval / fine
    for piece in range((count - 1) * fine):
        tau = piece * dtau
        p = p + dtau * h(tau + dtau / 2, p + dtau / 2 * h(tau, p))
        if (piece + 1) % fine == 0:
            out.append(p)
    return torch.stack(out)


def test_it_is_the_papers_integral() -> None:
    made, about = part(steps=8), tokens(LENGTH)
    x = drawn(2, LENGTH, WIDTH)
    with torch.no_grad():
        wanted = literal(made, LENGTH, 400)
        assert torch.allclose(made.embed(x, about) - x, wanted.expand(2, -1, -1), rtol=0, atol=2e-6)
        assert not torch.allclose(wanted[1:], wanted[:-1], rtol=0, atol=1e-2), "the encodings move"


def test_gradients_are_those_of_the_integral() -> None:
    made, about, above = part(steps=8), tokens(LENGTH), drawn(2, LENGTH, WIDTH, seed=3)
    x, leaves = drawn(2, LENGTH, WIDTH), list(made.parameters())
    ours = torch.autograd.grad((made.embed(x, about) * above).sum(), leaves)
    theirs = torch.autograd.grad((literal(made, LENGTH, 200) * above).sum(), leaves)
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert gradient.abs().max() > 1e-3
        # At a kink of ReLU the gradient has an error of the size of a step.
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=5e-3)


def test_positions_are_read_where_they_are() -> None:
    """Documents begin at p(0), and positions behind the trained ones go on."""
    made = part()
    x, packed = drawn(2, LENGTH, WIDTH), (torch.arange(LENGTH) >= 4).long().expand(2, -1)
    added = made.embed(x, tokens(LENGTH)) - x
    apart = made.embed(x, tokens(LENGTH, documents=packed)) - x
    assert close(apart[:, 4:], added[:, : LENGTH - 4])
    about = tokens(LENGTH)
    far = replace(about, positions=about.positions + 30, shared_values=SharedValues())
    with torch.no_grad():
        assert close(
            (made.embed(x, far) - x)[0],
            runge_kutta(made.layer_tables.derivative(), made.initial, 0.0, 0.1, 30 + LENGTH)[30:],
        )


def test_generation_goes_on_from_the_last_position() -> None:
    made, about, cache = part(steps=2), tokens(LENGTH + 20), dict[str, Any]()
    x, start = drawn(2, LENGTH + 20, WIDTH), 0
    whole = made.embed(x, about)
    for size in (3, 1, 8, 1, 15, 1):
        new = slice(start, start + size)
        here = Tokens(about.ids[:, new], about.positions[:, new], forward=Forward(cache=cache))
        assert close(made.embed(x[:, new], here), whole[:, new])
        start += size
    assert cache[made.path].shape == (LENGTH + 20, WIDTH)


def test_half_precision_solves_in_single() -> None:
    made = Floater(Floater.Config(), dims(width=WIDTH, length=LENGTH))
    name_modules(made)
    with torch.no_grad():
        for at, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=at))
    single = made.embed(torch.zeros(2, LENGTH, WIDTH), tokens(LENGTH))
    apply(made, torch.bfloat16, torch.float32)
    half = made.embed(torch.zeros(2, LENGTH, WIDTH, dtype=torch.bfloat16), tokens(LENGTH))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, single.bfloat16())


BLOCK: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 2},
    "ffn": {"kind": "dense", "hidden": 20},
    "position": {"kind": "floater", "hidden": 5},
}


def test_blocks_share_the_dynamics_and_have_initial_values_of_their_own() -> None:
    config = decode(Decoder.Config, {"width": 12, "position": "none", "stack": {"depth": 3, "block": BLOCK}})
    assert Decoder.check(config, (VOCABULARY, LENGTH), "model") == []
    model: Any = ready(Decoder(config, VOCABULARY, LENGTH))
    names = {name for name, _ in model.named_parameters() if "position" in name}
    assert names == {f"stack.blocks.{layer}.position.initial" for layer in range(3)} | {
        f"stack.position_tables.{name}" for name in ("up", "up_bias", "down", "down_bias")
    }
    about = Tokens.from_ids(torch.arange(LENGTH)[None])
    x = model.embed(about)
    for block in model.stack.blocks.values():
        assert block.position.layer_tables is model.stack.position_tables
        solved = runge_kutta(model.stack.position_tables.derivative(), block.position.initial, 0.0, 0.01, LENGTH)
        x = x + solved
        for sublayer in block.sublayers().values():
            x = sublayer(x, about)
    assert close(model.stack(model.embed(about), about), model.stack.norm(x))


def test_encoder_and_decoder_have_dynamics_of_their_own() -> None:
    stack = {"depth": 2, "block": BLOCK}
    config = decode(EncoderDecoder.Config, {"width": 12, "position": "none", "encoder": stack, "decoder": stack})
    model = EncoderDecoder(config, VOCABULARY, LENGTH)
    owners = {name.split(".")[0] for name, _ in model.named_parameters() if "position_tables" in name}
    assert owners == {"encoder", "decoder"}


def test_at_the_embeddings_it_has_its_own_dynamics() -> None:
    config = decode(Decoder.Config, {"width": 12, "position": "floater", "stack": {"depth": 1}})
    names = [name for name, _ in Decoder(config, VOCABULARY, LENGTH).named_parameters() if "position" in name]
    assert "embed.position.initial" in names
    assert "embed.position.layer_tables.up" in names


@pytest.mark.parametrize(("key", "value"), [("interval", 0), ("interval", -0.1), ("steps", 0), ("hidden", 0)])
def test_what_does_not_fit_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        decode(Floater.Config, {key: value})
