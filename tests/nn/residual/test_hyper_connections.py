"""Hyper-connections and mHC against their equations, token by token and stream by stream."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xscale.conformance.small_parts import close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.init import draw
from xscale.nn.residual.hyper_connections import ConnectionWeights, doubly_stochastic

WIDTH, LENGTH, STREAMS = 8, 5, 3


def built(kind: str, **residual: Any) -> Stack:
    block = decode(
        BlockConfig,
        {
            "mixer": {"kind": "attention", "heads": 2},
            "ffn": {"kind": "dense", "hidden": 12},
            "residual": {"kind": kind, "streams": STREAMS, **residual},
        },
    )
    return ready(Stack(StackConfig(depth=2, block=block), dims(width=WIDTH)))


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def centred(x: Tensor) -> Tensor:
    x = x - x.mean()
    return x / (x.square().mean() + 1e-6).sqrt()


def free_weights(part: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A_m [n, 1], B [1, n] and A_r [n, n] of Zhu et al. 2024, equations 10 to 13, for a token's streams H [n, D]; the
    norm is layer normalisation, as in algorithm 2 of appendix J."""
    normed = torch.stack([centred(row) for row in hidden])
    s_alpha, s_beta = part.scale
    a_m = s_alpha * torch.tanh(normed @ part.read_map.T) + part.read[:, None]
    b = s_beta * torch.tanh(normed @ part.write_map.T).T + part.write[None]
    a_r = s_alpha * torch.tanh(normed @ part.mix_map.T) + part.mix.reshape(STREAMS, STREAMS)
    return a_m, b, a_r


def manifold_weights(part: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """H_pre^T [n, 1], H_post [1, n] and H_res^T [n, n] of Xie et al. 2025, equations 7 to 9."""
    x = rms(hidden.reshape(1, -1))
    phi_pre, phi_post, phi_res = part.map.T.split((STREAMS, STREAMS, STREAMS**2), 1)
    b_pre, b_post, b_res = part.bias.split((STREAMS, STREAMS, STREAMS**2))
    alpha_pre, alpha_post, alpha_res = part.scale
    pre = torch.sigmoid(alpha_pre * (x @ phi_pre) + b_pre)
    post = 2 * torch.sigmoid(alpha_post * (x @ phi_post) + b_post)
    res = torch.exp((alpha_res * (x @ phi_res) + b_res).reshape(STREAMS, STREAMS))
    for _ in range(20):
        res = res / res.sum(0, keepdim=True)
        res = res / res.sum(1, keepdim=True)
    return pre.T, post, res.T


@pytest.mark.parametrize(
    ("kind", "weights_of"), [("hyper_connections", free_weights), ("mhc", manifold_weights)], ids=["free", "manifold"]
)
def test_a_stack_is_that_of_the_paper(kind: str, weights_of: Any) -> None:
    """H' = B^T T(H^T A_m)^T + A_r^T H for each sublayer T; the streams begin as copies and end in their sum."""
    stack: Any = built(kind)
    x, about = drawn(2, LENGTH, WIDTH), tokens(LENGTH)
    hidden = x[:, :, None].repeat(1, 1, STREAMS, 1)
    for block in stack.blocks.values():
        for sublayer in block.sublayers().values():
            each = [[weights_of(sublayer.connection, of_token) for of_token in row] for row in hidden]
            reads = torch.stack(
                [
                    torch.stack([(of_token.T @ a_m)[:, 0] for of_token, (a_m, _, _) in zip(row, weights, strict=True)])
                    for row, weights in zip(hidden, each, strict=True)
                ]
            )
            y = sublayer.part(sublayer.norm(reads), about)
            hidden = torch.stack(
                [
                    torch.stack(
                        [
                            b.T @ out[None] + a_r.T @ of_token
                            for of_token, out, (_, b, a_r) in zip(row, outs, weights, strict=True)
                        ]
                    )
                    for row, outs, weights in zip(hidden, y, each, strict=True)
                ]
            )
    torch.testing.assert_close(stack(x, about), stack.norm(hidden.sum(2)), rtol=1e-11, atol=1e-11)


def test_hyper_connections_begin_as_pre_norm() -> None:
    """Zhu et al. 2024, section 3.3: with the initial weights each stream is the residual stream of pre-norm."""
    stack: Any = built("hyper_connections")
    with torch.no_grad():
        for sublayer in (part for block in stack.blocks.values() for part in block.sublayers().values()):
            for name, parameter in sublayer.connection.named_parameters():
                parameter.copy_(draw(sublayer.connection.init[name], tuple(parameter.shape), 0, name))
    x, about = drawn(2, LENGTH, WIDTH), tokens(LENGTH)
    plain = x
    for block in stack.blocks.values():
        for sublayer in block.sublayers().values():
            plain = plain + sublayer.part(sublayer.norm(plain), about)
    assert close(stack(x, about), stack.norm(STREAMS * plain))


def test_sublayer_k_reads_stream_k_at_first() -> None:
    stack: Any = built("hyper_connections")
    parts = [sublayer.connection for block in stack.blocks.values() for sublayer in block.sublayers().values()]
    reads = [draw(part.init["read"], (STREAMS,), 0, "read").argmax().item() for part in parts]
    assert reads == [0, 1, 2, 0]


def test_the_mix_of_mhc_is_doubly_stochastic() -> None:
    mix = doubly_stochastic(drawn(4, STREAMS, STREAMS) * 3, 200)
    ones = torch.ones(4, STREAMS, dtype=mix.dtype)
    torch.testing.assert_close(mix.sum(-1), ones)
    torch.testing.assert_close(mix.sum(-2), ones)
    assert bool((mix >= 0).all())


def test_large_logits_do_not_overflow() -> None:
    mix = doubly_stochastic(torch.tensor([[900.0, -900.0], [-900.0, 900.0]]), 20)
    assert torch.equal(mix, torch.eye(2))


@pytest.mark.parametrize(
    ("kind", "decaying"),
    [
        ("hyper_connections", {"read_map", "write_map", "mix_map", "scale"}),
        ("mhc", {"map"}),
    ],
)
def test_what_decays_is_what_depends_on_the_token(kind: str, decaying: set[str]) -> None:
    """Zhu et al. 2024, section 4: the static component has no weight decay, the dynamic one has: s tanh(norm(H) W)."""
    connections = [module for module in built(kind).modules() if isinstance(module, ConnectionWeights)]
    assert len(connections) == 4
    for connection in connections:
        assert {name for name, decays in connection.decays.items() if decays} == decaying
