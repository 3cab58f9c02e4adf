"""Attention sinks of the core softmax (gpt-oss) against loops over the definition and against `transformers`."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.nn.attention.literal import HEADS, WIDTH, agree, build, drawn, inputs, masks, packed
from xscale.core.config import Config
from xscale.nn.attention.adaptive_span import AdaptiveSpan
from xscale.nn.attention.core import CORES, Core
from xscale.nn.attention.disagreement import Disagreement
from xscale.nn.attention.local_transformer import LocalTransformer
from xscale.nn.attention.ops.flex import FlexAttention
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax

LENGTH = 19


def sinks_of(core: Core) -> Tensor:
    assert core.sinks is not None
    return core.sinks


def by_loops(core: Core, cap: float | None = None) -> Any:
    """exp(z_ij) over exp(s_h) and the sum of exp(z_il) over the keys l that query i sees, query by query."""

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        seen = seen.expand(len(q), 1, *seen.shape[2:])
        samples = []
        for b in range(len(q)):
            heads = []
            for h in range(HEADS):
                rows = []
                for i in range(q.shape[2]):
                    total, mean = sinks_of(core)[h].exp(), torch.zeros(WIDTH, dtype=q.dtype)
                    for j in range(k.shape[2]):
                        if seen[b, 0, i, j]:
                            z = (q[b, h, i] * k[b, h, j]).sum() / math.sqrt(WIDTH)
                            z = z if cap is None else cap * torch.tanh(z / cap)
                            total, mean = total + z.exp(), mean + z.exp() * v[b, h, j]
                    rows.append(mean / total)
                heads.append(torch.stack(rows))
            samples.append(torch.stack(heads))
        return torch.stack(samples)

    return reference


@pytest.mark.parametrize(("causal", "cap"), [(True, None), (False, 2.0)])
def test_a_sink_is_a_logit_of_each_head_in_the_denominator(causal: bool, cap: float | None) -> None:
    core = build(Softmax.Config(sinks=True, soft_cap=cap), causal=causal)
    for mask in masks(9, causal=causal, documents=False):
        agree(core, mask, by_loops(core, cap))


def test_packed_documents_share_no_sink_but_the_head_s() -> None:
    core, documents = build(Softmax.Config(sinks=True), causal=True), packed(12, 4, 7)
    agree(core, AttentionMask(12, 12, True, query_documents=documents, key_documents=documents), by_loops(core))


def test_the_numbers_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    core = build(Softmax.Config(sinks=True), causal=True)
    q, k, v = inputs(LENGTH)
    module = SimpleNamespace(sinks=sinks_of(core), num_key_value_groups=2, training=False)
    future = torch.full((LENGTH, LENGTH), float("-inf"), dtype=q.dtype).triu(1)
    expected, _ = theirs.eager_attention_forward(module, q, k, v, future, WIDTH**-0.5)
    out = core(q, k, v, AttentionMask(LENGTH, LENGTH, True))
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-12, atol=1e-12)
    above = drawn(*out.shape, seed=4)
    leaves = [q, k, v, sinks_of(core)]
    gradients = torch.autograd.grad(out, leaves, above)
    wanted = torch.autograd.grad(expected, leaves, above.transpose(1, 2))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packs", [False, True])
def test_flex_equals_the_operators(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's reference of FlexAttention has a backward on a CPU, which torch only refuses to call.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(FlexAttention, "why_unsupported", staticmethod(lambda q: None))
    documents = packed(77, 13, 60) if packs else None
    mask = AttentionMask(77, 77, True, query_documents=documents, key_documents=documents)
    results = []
    for name in ("flex", "dense"):
        core = build(Softmax.Config(sinks=True, implementation=name), causal=True)
        q, k, v = inputs(77)
        out = core(q, k, v, mask)
        results.append([out, *torch.autograd.grad(out, [q, k, v, sinks_of(core)], drawn(*out.shape, seed=9))])
    for by_flex, by_operators in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, by_operators, rtol=1e-9, atol=1e-9)


def test_a_query_that_observes_no_key_gives_nothing() -> None:
    core = build(Softmax.Config(sinks=True), causal=False)
    observed = torch.ones(2, 5, 5, dtype=torch.bool)
    observed[:, 2] = False
    out = core(*inputs(5), replace(AttentionMask(5, 5, False), observed=observed))
    assert not out[:, :, 2].any()
    assert out[:, :, 1].all()


@pytest.mark.parametrize(
    "config", [AdaptiveSpan.Config(initial_span=9.0), LocalTransformer.Config(), Disagreement.Config()]
)
def test_cores_that_are_softmax_with_a_bias_have_sinks(config: Config) -> None:
    """A sink far below the scores changes nothing; one of value s multiplies by Z / (Z + exp(s))."""
    plain, sunk = build(config, causal=True), build(config.model_copy(update={"sinks": True}), causal=True)
    mask, (q, k, v) = AttentionMask(LENGTH, LENGTH, True), inputs(LENGTH)
    with torch.no_grad():
        theirs = dict(plain.named_parameters())
        for name, parameter in sunk.named_parameters():
            parameter.copy_(theirs[name] if name in theirs else torch.full_like(parameter, -90.0))
        torch.testing.assert_close(sunk(q, k, v, mask), plain(q, k, v, mask))
        sinks_of(sunk).fill_(1.5)
        ratio = sunk(q, k, v, mask) / plain(q, k, v, mask)  # [B, H, T, K], the same for all channels
    assert (ratio < 1).all()
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_traits_and_which_operators() -> None:
    assert CORES.get("softmax").traits.exact
    core = build(Softmax.Config(sinks=True), causal=True)
    assert not core.traits.exact
    assert not Softmax.traits_of(Softmax.Config(sinks=True)).exact
    assert Softmax.traits_of(Softmax.Config()).exact
    assert not core._uses_flex(inputs(4)[0], AttentionMask(4, 4, True)), "a CPU has no fused FlexAttention"  # type: ignore[attr-defined]
    weights = core.attention_weights(*inputs(LENGTH)[:2], AttentionMask(LENGTH, LENGTH, True))  # type: ignore[attr-defined]
    assert (weights.sum(-1) < 1).all()
    torch.testing.assert_close(weights[:, :, :, 0].sum() > 0, torch.tensor(True))


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [False, True])
def test_fused_flex_equals_the_operators(packs: bool) -> None:
    torch.compiler.reset()
    documents = packed(300, 13, 60).cuda() if packs else None
    mask = AttentionMask(300, 300, True, query_documents=documents, key_documents=documents)
    results = []
    for name in ("auto", "dense"):
        core = build(Softmax.Config(sinks=True, implementation=name), causal=True).float().cuda()
        # Heads of sixteen channels, the fewest of the fused kernels.
        q, k, v = (torch.cat((x, x), -1).detach().float().cuda().requires_grad_() for x in inputs(300))
        assert core._uses_flex(q, mask) == (name == "auto")  # type: ignore[attr-defined]
        out = core(q, k, v, mask)
        above = drawn(*out.shape, seed=9).float().cuda()
        results.append([out, *torch.autograd.grad(out, [q, k, v, sinks_of(core)], above)])
    for by_flex, by_operators in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, by_operators, rtol=1e-2, atol=1e-2 * by_operators.abs().max().item())
