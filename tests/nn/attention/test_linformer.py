"""Linformer and efficient attention against their equations."""

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, ready, tokens
from tests.nn.attention.literal import agree, build, drawn, inputs
from xscale.core.errors import ConfigError
from xscale.nn.attention.core import Core
from xscale.nn.attention.linear import EfficientAttention
from xscale.nn.attention.linformer import Linformer
from xscale.nn.attention.nprf import Nprf
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import LayerRule, Stack, StackConfig
from xscale.nn.ffn.ffn import Dense
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.longt5 import TransientGlobalAttention
from xscale.nn.position.relative import Relative


@pytest.mark.parametrize("sharing", ["none", "heads", "values"])
@pytest.mark.parametrize(("queries", "keys"), [(50, 50), (20, 70)])
def test_linformer_mixes_keys_along_the_sequence(queries: int, keys: int, sharing: str) -> None:
    """Equation 7 of the paper, head by head, in each of its modes of sharing."""
    core = build(Linformer.Config(projected_length=12, sharing=sharing), causal=False, cross=queries != keys)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        heads = []
        for i in range(4):
            e = (core.e[i] if sharing == "none" else core.e)[:, :keys]
            f = e if sharing == "values" else (core.f[i] if sharing == "none" else core.f)[:, :keys]
            weights = torch.softmax(q[:, i] @ (e @ k[:, i]).mT / 8**0.5, -1)
            heads.append(weights @ (f @ v[:, i]))
        return torch.stack(heads, 1)

    agree(core, AttentionMask(queries, keys, False), reference)


@pytest.mark.parametrize("keys", [256, 70])
@pytest.mark.parametrize(
    ("projection", "sharing"),
    [("mean", "heads"), ("max", "heads"), ("convolution", "heads"), ("convolution", "values"), ("convolution", "none")],
)
def test_linformer_pools_windows(projection: str, sharing: str, keys: int) -> None:
    """The paper's other projections, whose kernel and stride are n / k: 256 / 12, rounded up."""
    core = build(Linformer.Config(projected_length=12, projection=projection, sharing=sharing), causal=False)
    windows = [slice(start, min(start + 22, keys)) for start in range(0, keys, 22)]

    def shorten(x: Tensor, name: str) -> Tensor:
        if projection == "mean":
            return torch.stack([x[:, :, window].mean(2) for window in windows], 2)
        if projection == "max":
            return torch.stack([x[:, :, window].max(2).values for window in windows], 2)
        kernels = core.get_parameter("e" if sharing == "values" else name)
        kernels = kernels if sharing == "none" else kernels.expand(4, -1, -1, -1)
        return torch.stack(
            [
                sum(
                    torch.einsum("bhk,hkl->bhl", x[:, :, at], kernels[:, at - window.start])
                    for at in range(window.start, window.stop)
                )
                for window in windows
            ],
            2,
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return torch.softmax(q @ shorten(k, "e").mT / 8**0.5, -1) @ shorten(v, "f")

    agree(core, AttentionMask(30, keys, False), reference)


def test_pooling_has_nothing_to_share() -> None:
    config = Linformer.Config(projection="mean", sharing="none")
    assert [problem.path for problem in Linformer.check(config, None, "core")] == ["core.sharing"]


def test_linformer_refuses_positions_it_has_no_weights_for() -> None:
    core = build(Linformer.Config(projected_length=12), causal=False, length=40)
    with pytest.raises(ConfigError, match="weights for 40 positions, and the sequence has 50 tokens"):
        core(*inputs(50), AttentionMask(50, 50, False))


E = {sharing: Linformer.Config(projected_length=5, sharing=sharing) for sharing in ("layers", "values")}


@pytest.mark.parametrize(
    ("shared", "separate"),
    [
        (
            Linformer.Config(projected_length=5, sharing="layers"),
            Linformer.Config(projected_length=5, sharing="values"),
        ),
        (Nprf.Config(features=6, shared=True), Nprf.Config(features=6)),
    ],
    ids=["linformer", "nprf"],
)
def test_layers_share_a_table(shared: Core.Config, separate: Core.Config) -> None:
    """A shared table gives what separate tables of the same numbers give; the gradient is the sum of theirs."""

    def stack_of(core: Core.Config) -> Stack:
        block = BlockConfig(mixer=Attention.Config(heads=4, core=core), ffn=Dense.Config())
        return ready(Stack(StackConfig(depth=3, block=block), dims(causal=False, length=40)))

    one, many = stack_of(shared), stack_of(separate)
    (name,) = (name for name, _ in one.named_parameters() if "core_tables" in name)
    own = name.removeprefix("core_tables")
    copies = [parameter for other, parameter in many.named_parameters() if other.endswith(f"core{own}")]
    assert len(copies) == 3
    with torch.no_grad():
        for other, parameter in many.named_parameters():
            parameter.copy_(one.get_parameter(name if other.endswith(f"core{own}") else other))
    x = drawn(2, 40, 32)
    outs = [stack(x, tokens(40)) for stack in (one, many)]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    (total,) = torch.autograd.grad(outs[0].square().sum(), one.get_parameter(name))
    torch.testing.assert_close(total, sum(torch.autograd.grad(outs[1].square().sum(), copies)), rtol=1e-9, atol=1e-9)


def test_tables_that_layers_share_have_one_shape() -> None:
    other = Attention.Config(heads=4, core=E["layers"].model_copy(update={"projected_length": 6}))
    block = BlockConfig(mixer=Attention.Config(heads=4, core=E["layers"]))
    config = StackConfig(depth=2, block=block, rules=(LayerRule(every=2, at=1, mixer=other),))
    (problem,) = Stack.check(config, dims(causal=False), "stack")
    assert problem.path == "stack.rules"


def test_tables_of_longt5s_blocks_are_not_those_of_another_core() -> None:
    """A stack holds one set of shared tables, so a second kind of table is refused."""
    longt5 = TransientGlobalAttention.Config(heads=4, position=Relative.Config(shared=True))
    for other in (E["layers"], Nprf.Config(features=6, shared=True)):
        rule = LayerRule(every=2, at=1, mixer=Attention.Config(heads=4, core=other))
        config = StackConfig(depth=2, block=BlockConfig(mixer=longt5), rules=(rule,))
        (problem,) = Stack.check(config, dims(causal=False), "stack")
        assert problem.path == "stack.rules"
        assert f"(longt5, {other.kind})" in problem.what
    assert Stack.check(StackConfig(depth=2, block=BlockConfig(mixer=longt5)), dims(causal=False), "stack") == []


def test_efficient_attention_weighs_features_and_positions() -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return (torch.softmax(q, -1) @ torch.softmax(k, -2).mT) @ v

    agree(build(EfficientAttention.Config(), causal=False), AttentionMask(50, 50, False), reference)
