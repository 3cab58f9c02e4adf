"""gMLP and MLP-Mixer against their papers' equations, their start, and the length that their weights belong to."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.positional_mlp import Gmlp, MlpMixer
from xscale.nn.tokens import Tokens

LENGTH = 13


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def gmlp(causal: bool = True, **config: Any) -> Gmlp:
    return ready(Gmlp(Gmlp.Config(hidden=12, **config), dims(causal=causal, length=LENGTH)))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("toeplitz", [True, False], ids=["toeplitz", "free"])
def test_the_spatial_gating_unit(causal: bool, toeplitz: bool) -> None:
    part = gmlp(causal, toeplitz=toeplitz)
    for length in (LENGTH, 5):
        x = drawn(2, length, WIDTH)
        with torch.no_grad():
            z1 = gelu(x @ part.up.weight.T + part.up.get_parameter("bias"))
            z2 = gelu(x @ part.up_gate.weight.T + part.up_gate.get_parameter("bias"))
            mean, variance = z2.mean(-1, keepdim=True), z2.var(-1, unbiased=False, keepdim=True)
            gain, shift = part.norm.get_parameter("weight"), part.norm.get_parameter("bias")
            z2 = (z2 - mean) / (variance + 1e-5).sqrt() * gain + shift
            gated = torch.zeros_like(z1)
            for i in range(length):
                gate = part.spatial_bias[i].expand(2, 6).clone()
                for j in range(i + 1 if causal else length):
                    distance = i - j + (0 if causal else LENGTH - 1)
                    gate += (part.spatial[distance] if toeplitz else part.spatial[i, j]) * z2[:, j]
                gated[:, i] = z1[:, i] * gate
            expected = gated @ part.down.weight.T + part.down.get_parameter("bias")
            assert close(part(x, tokens(length)), expected)


def test_it_starts_as_a_feed_forward_network() -> None:
    """W is near 0 and b is 1: the gate is nearly open, whatever the other tokens are."""
    for toeplitz in (False, True):
        part = Gmlp(Gmlp.Config(toeplitz=toeplitz), dims(length=200))
        materialize(part, 0)
        assert part.up.weight.shape == (3 * WIDTH, WIDTH), "six times the width, in two halves"
        x = torch.randn(2, 200, WIDTH)
        plain = part.down(torch.nn.functional.gelu(part.up(x)))
        assert (part(x, tokens(200)) - plain).abs().max() < 0.15 * plain.abs().max()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_head_of_attention_beside_the_gate(causal: bool) -> None:
    """aMLP (Liu et al. 2021, section 4.3): the head reads the layer's input, and is added to what gates."""
    part, length = gmlp(causal, attention=3), 7
    assert part.attention is not None
    x = drawn(1, length, WIDTH)
    with torch.no_grad():
        z1 = gelu(x @ part.up.weight.T + part.up.get_parameter("bias"))
        z2 = part.norm(gelu(x @ part.up_gate.weight.T + part.up_gate.get_parameter("bias")))
        qkv = x @ part.attention.qkv.weight.T + part.attention.qkv.get_parameter("bias")
        q, k, v = qkv[..., :3], qkv[..., 3:6], qkv[..., 6:]
        gated = torch.zeros_like(z1)
        for i in range(length):
            last = i + 1 if causal else length
            weights = torch.tensor([float(q[0, i] @ k[0, j]) / 3**0.5 for j in range(last)], dtype=x.dtype).exp()
            head = sum(weights[j] / weights.sum() * v[0, j] for j in range(last))
            gate = sum(part.spatial[i, j] * z2[0, j] for j in range(last)) + part.spatial_bias[i]
            written = head @ part.attention.out.weight.T + part.attention.out.get_parameter("bias")
            gated[0, i] = z1[0, i] * (gate + written)
        assert close(part(x, tokens(length)), gated @ part.down.weight.T + part.down.get_parameter("bias"))


@pytest.mark.parametrize("attention", [None, 3])
def test_generation_keeps_the_normalised_half(attention: int | None) -> None:
    part, x = gmlp(attention=attention), drawn(2, LENGTH, WIDTH)
    whole, cache, about = part(x, tokens(LENGTH)), dict[str, Any](), tokens(LENGTH)
    for start in range(LENGTH):
        here = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(x[:, start : start + 1], here), whole[:, start : start + 1])


def test_the_perceptron_along_the_tokens() -> None:
    part = ready(MlpMixer(MlpMixer.Config(hidden=7), dims(causal=False, length=LENGTH)))
    for length in (LENGTH, 6):
        x = drawn(2, length, WIDTH)
        expected = torch.zeros_like(x)
        with torch.no_grad():
            for sample in range(2):
                for channel in range(WIDTH):
                    hidden = gelu(part.up[:, :length] @ x[sample, :, channel] + part.up_bias)
                    expected[sample, :, channel] = part.down[:length] @ hidden + part.down_bias[:length]
            assert close(part(x, tokens(length)), expected)
    assert MlpMixer(MlpMixer.Config(), dims(causal=False)).up.shape[0] == WIDTH // 2


@pytest.mark.parametrize("kind", [Gmlp, MlpMixer])
def test_another_length_is_refused(kind: type[Gmlp] | type[MlpMixer]) -> None:
    around = dims(causal=False, length=LENGTH)
    for length in (LENGTH - 1, LENGTH + 1):
        (problem,) = kind.check(decode(kind.Config, {"length": length}), around, "mixer")
        assert problem.path == "mixer.length"
        assert f"Take {LENGTH} or null" in str(problem)
    assert kind.check(decode(kind.Config, {"length": LENGTH}), around, "mixer") == []
    part = ready(kind(decode(kind.Config, {}), around))
    with pytest.raises(ConfigError, match=f"weights for {LENGTH} positions, and the sequence has {LENGTH + 1}"):
        part(drawn(1, LENGTH + 1, WIDTH), tokens(LENGTH + 1, batch=1))


def test_channels_come_in_two_halves() -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        decode(Gmlp.Config, {"hidden": 7})
