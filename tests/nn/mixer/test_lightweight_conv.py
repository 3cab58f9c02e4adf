"""Lightweight and dynamic convolutions against the paper's sums, Hugging Face's ConvBERT, and their linear cost."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, ready, tokens
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.mixer import lightweight_conv
from xscale.nn.mixer.lightweight_conv import LightweightConv, convolve
from xscale.nn.tokens import Tokens

LENGTH = 41


def network(causal: bool = True, layer: int = 0, **config: Any) -> LightweightConv:
    given = {"heads": 4, "kernel_sizes": (5,), **config}
    around = dims(causal=causal, layer=layer)
    assert LightweightConv.check(LightweightConv.Config(**given), around, "mixer") == []
    return ready(LightweightConv(LightweightConv.Config(**given), around))


def literal(part: LightweightConv, y: Tensor, causal: bool, documents: Tensor | None = None) -> Tensor:
    """The paper's equations, token by token, channel by channel."""
    with torch.no_grad():
        x = y @ part.v.weight.T
        if part.v.bias is not None:
            x = x + part.v.bias
        if part.gate is not None:
            gate = y @ part.gate.weight.T + (0 if part.gate.bias is None else part.gate.bias)
            x = x / (1 + torch.exp(-gate))
        heads, size, channels = 4, part.kernel_size, x.shape[2]
        out = torch.zeros_like(x)
        for sample in range(len(x)):
            for t in range(x.shape[1]):
                for c in range(channels):
                    head = math.ceil((c + 1) * heads / channels) - 1
                    if part.predict is None:
                        logits = part.kernel[head]
                    else:
                        rows = slice(head * size, (head + 1) * size)
                        bias = 0 if part.predict.bias is None else part.predict.bias[rows]
                        logits = part.predict.weight[rows] @ x[sample, t] + bias
                    exponentials = [math.exp(value) for value in logits]
                    for j in range(1, size + 1):
                        last = size if causal else math.ceil((size + 1) / 2)
                        at = t + (j - last) * part.dilation
                        if not 0 <= at < x.shape[1]:
                            continue
                        if documents is not None and documents[sample, at] != documents[sample, t]:
                            continue
                        out[sample, t, c] += exponentials[j - 1] / sum(exponentials) * x[sample, at, c]
        projected: Tensor = out @ part.o.weight.T
        return projected if part.o.bias is None else projected + part.o.bias


CONFIGS: list[dict[str, Any]] = [
    {},
    {"dynamic": True},
    {"dynamic": True, "bias": True, "kernel_sizes": (4,), "head_width": 3},
    {"bias": True, "kernel_sizes": (4,), "glu": False},
    {"kernel_sizes": (3,), "dilations": (4,)},
    {"kernel_sizes": (4,), "dilations": (3,), "dynamic": True},
    {"kernel_sizes": (1,)},
    {"kernel_sizes": (23,)},
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_the_papers_sum(config: dict[str, Any], causal: bool) -> None:
    part, y = network(causal, **config), drawn(1, 19, WIDTH)
    assert close(part(y, tokens(19, batch=1)), literal(part, y, causal))
    documents = numbered(8, 11, batch=1)
    packed = part(y, tokens(19, batch=1, documents=documents))
    assert close(packed, literal(part, y, causal, documents))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_packed_documents_are_documents_apart(config: dict[str, Any], causal: bool) -> None:
    part, y = network(causal, **config), drawn(2, LENGTH, WIDTH)
    packed = part(y, tokens(LENGTH, documents=numbered(17, 3, 21)))
    apart = [part(piece, tokens(piece.shape[1])) for piece in y.split([17, 3, 21], 1)]
    assert close(packed, torch.cat(apart, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_generation_keeps_the_last_inputs(dynamic: bool) -> None:
    part, y = network(dynamic=dynamic, kernel_sizes=(7,), dilations=(2,)), drawn(2, LENGTH, WIDTH)
    whole, cache = part(y, tokens(LENGTH)), dict[str, Any]()
    for start in range(LENGTH):
        about = tokens(LENGTH)
        here = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(y[:, start : start + 1], here), whole[:, start : start + 1])
        assert cache[part.path].shape == (2, 12, WIDTH)
        assert cache[part.path].untyped_storage().nbytes() == 2 * 12 * WIDTH * 8


def test_sizes_follow_the_layer() -> None:
    sizes = [network(layer=layer, kernel_sizes=(3, 7, 15)).kernel_size for layer in range(5)]
    assert sizes == [3, 7, 15, 15, 15]
    assert [network(layer=layer, dilations=(1, 4)).left for layer in range(3)] == [4, 16, 16]


def test_entries_of_the_normalised_kernels_are_dropped() -> None:
    """DropConnect: an entry is 0 or its softmax over 1 - p; one draw for all tokens of a lightweight convolution."""
    for dynamic in (False, True):
        part = network(dynamic=dynamic, kernel_sizes=(31,), dropout=0.25).train()
        v = drawn(2, LENGTH, WIDTH)
        torch.manual_seed(1)
        with torch.no_grad():
            noisy = part.kernels(v, tokens(LENGTH, rng_seed=1))
            plain = part.kernels(v, tokens(LENGTH))
        kept = noisy != 0
        assert noisy.shape == ((2, LENGTH, 4, 31) if dynamic else (1, 1, 4, 31))
        assert close(noisy[kept], plain[kept] / 0.75)
        assert 0.6 < kept.double().mean() < 0.9
        assert torch.equal(part.eval().kernels(v, tokens(LENGTH, rng_seed=1)), plain)


def test_blocks_do_not_show() -> None:
    """Lengths around the block's, which is k - 1 tokens from k = 17 on."""
    for size in (3, 17, 31):
        for length in (1, 2, 15, 16, 17, 31, 33, 64):
            x, kernels = drawn(2, length + size - 1, 2, 3), drawn(2, length, 2, size, seed=1)
            expected = torch.stack(
                [torch.einsum("bhj,bjhk->bhk", kernels[:, t], x[:, t : t + size]) for t in range(length)], 1
            )
            assert close(convolve(x, kernels), expected)
            same = kernels[:1, :1]
            assert close(convolve(x, same), convolve(x, same.expand(2, length, -1, -1)))


@pytest.mark.parametrize("kernel_tokens", [1, 83])
def test_chunks_do_not_show(kernel_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last chunk shorter than the kernel joins the one before (of 4 and 7); 89 inputs are not two chunks of 87."""
    for padding, chunk in ((6, 20), (6, 41), (2, 7), (6, 87), (6, 4)):
        generator = torch.Generator().manual_seed(padding + chunk)
        x = torch.randn(2, 83 + padding, 3, 4, dtype=torch.float64, generator=generator).requires_grad_()
        kernels = torch.randn(2, kernel_tokens, 3, padding + 1, dtype=torch.float64, generator=generator)
        kernels = (kernels if kernel_tokens > 1 else kernels[:1]).requires_grad_()
        whole = convolve(x, kernels)
        expected = torch.autograd.grad(whole.square().sum(), (x, kernels))
        with monkeypatch.context() as patch:
            patch.setattr(lightweight_conv, "CHUNK", chunk * 2 * 3 * 4)
            out = convolve(x, kernels)
            assert type(out.grad_fn).__name__ == ("SliceBackward0" if chunk == 87 else "CatBackward0")
            assert close(out, whole)
            assert all(map(close, torch.autograd.grad(out.square().sum(), (x, kernels)), expected))


def test_convbert_has_the_same_convolution() -> None:
    """Its kernels come from a product of queries and convolved keys: here keys of 1, and the values as queries."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention

    about = transformers.ConvBertConfig(
        hidden_size=2 * WIDTH, num_attention_heads=4, head_ratio=1, conv_kernel_size=5, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    theirs = ConvBertSelfAttention(about).double().eval()
    part = ready(
        LightweightConv(
            LightweightConv.Config(heads=4, head_width=8, dynamic=True, glu=False, bias=True, kernel_sizes=(5,)),
            dims(width=2 * WIDTH, causal=False),
        )
    )
    with torch.no_grad():
        keys = theirs.key_conv_attn_layer
        keys.depthwise.weight.zero_()
        keys.pointwise.weight.zero_()
        keys.bias.fill_(1.0)
        for linear in (theirs.query, theirs.conv_out_layer):
            linear.weight.copy_(part.v.weight)
            linear.bias.copy_(part.v.get_parameter("bias"))
        assert part.predict is not None
        theirs.conv_kernel_layer.weight.copy_(part.predict.weight)
        theirs.conv_kernel_layer.bias.copy_(part.predict.get_parameter("bias"))
        y = drawn(2, LENGTH, 2 * WIDTH)
        # A head's channels: those of attention, then those of the convolution.
        convolved = theirs(y)[0].view(2, LENGTH, 8, 8)[:, :, 4:]
        assert close(part(y, tokens(LENGTH)), part.o(convolved.flatten(2)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_cost_is_linear(dynamic: bool) -> None:
    """FLOPs, and all that backward needs, of a forward over 1024 and 4096 tokens, also of packed documents."""
    part = network(dynamic=dynamic, kernel_sizes=(31,)).float()
    for documents in (False, True):
        flops, saved = [], []
        for length in (1024, 4096):
            about = tokens(length, batch=1, documents=numbered(100, length - 100, batch=1) if documents else None)
            sizes: list[int] = []

            def keep(x: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(x.numel())
                return x

            hooks: Any = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
            with FlopCounterMode(display=False) as counter, hooks:
                part(torch.randn(1, length, WIDTH), about)
            flops.append(counter.get_total_flops())
            saved.append(sum(sizes))
        assert math.log(flops[1] / flops[0], 4) < 1.05
        assert math.log(saved[1] / saved[0], 4) < 1.05
    assert part.multiply_adds(4096, 4096) == 4096 * 31 * WIDTH


def test_half_precision_normalises_in_single() -> None:
    part = network(dynamic=True).bfloat16()
    v = drawn(1, LENGTH, WIDTH).bfloat16()
    assert part.kernels(v, tokens(LENGTH)).dtype == torch.float32
    assert part(v, tokens(LENGTH, batch=1)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"kernel_sizes": []}, "at least 1 item"),
        ({"kernel_sizes": [0]}, "must be >= 1"),
        ({"dilations": [0]}, "must be >= 1"),
        ({"dropout": 1.0}, r"must be in \[0, 1\)"),
    ],
)
def test_impossible_values_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode(LightweightConv.Config, config)


def test_heads_divide_the_width() -> None:
    (problem,) = LightweightConv.check(LightweightConv.Config(heads=5), dims(), "mixer")
    assert problem.path == "mixer.heads"
