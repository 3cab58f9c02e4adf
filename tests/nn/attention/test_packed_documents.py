"""Packed documents: long ones never make a mask [B, 1, T, T], and grouped queries never make torch compute all scores.

No fused kernel of torch takes a mask and groups of queries at once; its math path would keep scores [B, H, T, T]. The
tensors are on a CPU and say that they are on a GPU, so that layers decide as there.
"""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import HEADS, WIDTH, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.nn.attention import softmax
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens
from xscale_kernels.packed_attention import DocumentSpans

DOCUMENTS = numbered(20, 31, 13)
LAYERS: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group": {"kv_heads": 1},
    "bias": {"position": {"kind": "alibi"}, "core": {"kind": "softmax", "implementation": "dense"}},
    "adaptive span": {"core": {"kind": "adaptive_span", "max_span": 16}},
    "local": {"core": {"kind": "local_transformer"}},
    "persistent memory": {"core": {"kind": "persistent_memory", "persistent": 8}},
}


def attended(
    config: dict[str, Any], documents: Tensor | None, *, on_gpu: bool
) -> tuple[Tensor, list[tuple[bool, bool]]]:
    """Output of a layer, and whether each call of torch's attention has a mask, and grouped queries."""
    calls: list[tuple[bool, bool]] = []
    attention = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        grouped = q.shape[1] != k.shape[1] or options.get("enable_gqa", False)
        calls.append((options.get("attn_mask") is not None, grouped))
        return attention(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        if on_gpu:
            patch.setattr(Tensor, "is_cuda", True)
        layer = ready(Attention(decode(Attention.Config, {"heads": HEADS, "kv_heads": 2, **config}), dims()))
        x = drawn(len(DOCUMENTS), DOCUMENTS.shape[1], WIDTH)
        return layer(x, Tokens.from_ids(torch.zeros_like(DOCUMENTS), documents)), calls


@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_comes_with_as_many_keys_as_queries_on_a_gpu(name: str) -> None:
    output, calls = attended(LAYERS[name], DOCUMENTS, on_gpu=True)
    assert calls
    assert all((masked, grouped) == (True, False) for masked, grouped in calls)
    expected, _ = attended(LAYERS[name], DOCUMENTS, on_gpu=False)
    assert torch.allclose(output, expected, rtol=1e-9, atol=1e-11)


def test_a_cpu_shares_keys_among_queries() -> None:
    """Negative control: without a GPU the mask and the groups are given together, and the record says so."""
    _, calls = attended({}, DOCUMENTS, on_gpu=False)
    assert calls == [(True, True)]


def test_without_documents_groups_stay_groups() -> None:
    """Flash knows groups and needs no mask: nothing is repeated."""
    _, calls = attended({}, None, on_gpu=True)
    assert calls == [(False, True)]


def test_long_sequences_are_attended_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same output and gradients as with a mask of all pairs."""
    documents, x = numbered(100, 450, 50), drawn(2, 600, WIDTH).requires_grad_()
    layer = ready(Attention(decode(Attention.Config, {"heads": HEADS, "kv_heads": 2}), dims()))
    tokens, above = Tokens.from_ids(torch.zeros_like(documents), documents), drawn(2, 600, WIDTH)

    def both() -> tuple[Tensor, ...]:
        out = layer(x, tokens)
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), above)

    monkeypatch.setattr(softmax, "LEAST_PACKED", 600)
    by_mask = both()
    monkeypatch.setattr(softmax, "LEAST_PACKED", 599)
    monkeypatch.setattr(AttentionMask, "allowed", property(lambda mask: pytest.fail("a mask of all pairs")))
    for ours, expected in zip(both(), by_mask, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


PEAK = """
import sys, torch
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax
from xscale.nn.attention.softmax import Softmax
from xscale.nn.dims import Dims
torch.set_num_threads(1)
core = Softmax(Softmax.Config(), Dims(width=256, depth=1, vocabulary=9, length=8192, causal=True), 4, 64)
def run(length, packed):
    q, k, v = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3))
    documents = (torch.arange(length) * 8 // length)[None] if packed else None
    mask = AttentionMask(length, length, True, query_documents=documents, key_documents=documents)
    torch.autograd.grad(core(q, k, v, mask).sum(), (q, k, v))
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
run(1024, sys.argv[1] == "packed")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
run(8192, sys.argv[1] == "packed")
print(peak() - before)
"""


def peak(kind: str) -> float:
    """MiB by which memory grows in a forward and backward of 8,192 tokens, `packed` or `plain`."""
    done = subprocess.run([sys.executable, "-c", PEAK, kind], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_packing_takes_little_memory() -> None:
    packed, plain = peak("packed"), peak("plain")
    assert 6 * 8 < plain < 12 * 8, "q, k, v, the output and their gradients take 8 MiB each"
    assert packed < 1.2 * plain


def of_library(monkeypatch: pytest.MonkeyPatch, **core: Any) -> tuple[Softmax, list[Any]]:
    """A core that believes to be on a GPU, and the implementation and spans of each call of packed_attention."""
    calls: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, causal: bool, **options: Any) -> Tensor:
        calls.append((options["implementation"], options["spans"]))
        return q

    monkeypatch.setattr(softmax, "packed_attention", attend)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Softmax, "_uses_flex", lambda *_: False)
    return Softmax(Softmax.Config(**core), dims(), 4, 64), calls


def packed_call(**changes: Any) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
    documents = numbered(20, 31, 13)
    mask = AttentionMask(documents.shape[1], documents.shape[1], True)
    q, k = (torch.zeros(len(documents), heads, documents.shape[1], 64) for heads in (4, 2))
    return q, k, k, replace(mask, query_documents=documents, key_documents=documents, **changes)


def test_a_library_attends_packed_documents_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first where one can run the call, and its spans are found once for all blocks."""
    monkeypatch.setattr(softmax, "library_refusals", lambda *_: None)
    core, calls = of_library(monkeypatch)
    q, k, v, mask = packed_call()
    core(q, k, v, mask)
    core(q, k, v, mask)
    assert [named for named, _ in calls] == [None, None]
    assert calls[0][1] is calls[1][1]
    assert calls[0][1].offsets[-1] == q.shape[0] * q.shape[2]


def test_flex_attends_where_the_libraries_refuse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, calls = of_library(monkeypatch)
    with caplog.at_level("INFO", logger="xscale_kernels"):
        core(*packed_call())
    assert not calls
    assert "packed_attention: flex (first usable; flash_attn_3 refused: it takes bfloat16 or float16" in caplog.text


@pytest.mark.parametrize(
    ("core", "changes"),
    [
        ({"soft_cap": 3.0}, {}),
        ({"implementation": "dense"}, {}),
        ({"implementation": "flex"}, {}),
        ({}, {"dropout": 0.1}),
        ({}, {"key_prefix": torch.zeros(1, 64, dtype=torch.bool)}),
        ({}, {"bias": torch.zeros(1, 4, 64, 64)}),
    ],
)
def test_libraries_take_documents_and_nothing_else(
    core: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "library_refusals", lambda *_: None)
    built, calls = of_library(monkeypatch, **core)
    built(*packed_call(**changes))
    assert not calls


def test_a_named_implementation_attends_in_auto_and_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    for implementation in ("auto", "dense"):
        core, calls = of_library(monkeypatch, implementation=implementation)
        core.kernel_choices = {"packed_attention": "flash_attn"}
        core(*packed_call())
        assert [named for named, _ in calls] == ["flash_attn"]


def test_spans_are_found_before_documents_go_to_a_gpu() -> None:
    tokens = Tokens.from_ids(torch.zeros_like(DOCUMENTS), DOCUMENTS)
    assert tokens.to(torch.device("cpu")).found_document_spans() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "map_tensors", lambda self, function: self)
        patch.setattr(DocumentSpans, "to", lambda self, device: self)
        spans = tokens.to(torch.device("cuda")).found_document_spans()
    assert spans is not None
    assert spans.sizes.tolist() == [3 * len(DOCUMENTS), 31]
    layer = ready(Attention(decode(Attention.Config, {"heads": HEADS}), dims()))
    q = torch.zeros(len(DOCUMENTS), HEADS, DOCUMENTS.shape[1], 8)
    assert layer.make_mask(q, q, tokens, tokens).spans is spans
