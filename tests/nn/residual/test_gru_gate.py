"""The GRU gate of GTrXL against its equations."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.small_parts import dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.init import draw

WIDTH, LENGTH = 8, 5


def built() -> Any:
    mixer, ffn = {"kind": "attention", "heads": 2}, {"kind": "dense", "hidden": 12}
    block = decode(BlockConfig, {"mixer": mixer, "ffn": ffn, "residual": "gru_gate"})
    return ready(Stack(StackConfig(depth=2, block=block), dims(width=WIDTH)))


def gate(part: Any, x: Tensor, y: Tensor) -> Tensor:
    """Parisotto et al. 2019, section 3.2, for one token: x and y [D]."""
    w_r, w_z, w_g = part.of_output.split(WIDTH)
    u_r, u_z = part.of_stream.split(WIDTH)
    r = 1 / (1 + torch.exp(-(w_r @ y + u_r @ x)))
    z = 1 / (1 + torch.exp(-(w_z @ y + u_z @ x - part.bias)))
    h = torch.tanh(w_g @ y + part.candidate @ (r * x))
    return (1 - z) * x + z * h


def test_a_stack_is_that_of_the_paper() -> None:
    """E' = g(E, relu(f(norm(E)))) for each sublayer f, with the final norm of pre-norm."""
    stack, about = built(), tokens(LENGTH)
    x = hidden = drawn(2, LENGTH, WIDTH)
    for block in stack.blocks.values():
        for sublayer in block.sublayers().values():
            y = sublayer.part(sublayer.norm(hidden), about).clamp(min=0)
            hidden = torch.stack(
                [
                    torch.stack([gate(sublayer.gru, *pair) for pair in zip(*row, strict=True)])
                    for row in zip(hidden, y, strict=True)
                ]
            )
    torch.testing.assert_close(stack(x, about), stack.norm(hidden), rtol=1e-11, atol=1e-11)


def test_it_begins_near_the_identity() -> None:
    """Section 3.2: with b_g = 2 a gate begins with z near sigmoid(-2)."""
    part = built().blocks["0"].mixer.gru
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(draw(part.init[name], tuple(parameter.shape), 0, name))
    x, y = drawn(2, LENGTH, WIDTH), drawn(2, LENGTH, WIDTH, seed=1)
    kept = (part(x, y) / x).detach().median()
    assert abs(float(kept) - torch.sigmoid(torch.tensor(2.0)).item()) < 0.05
