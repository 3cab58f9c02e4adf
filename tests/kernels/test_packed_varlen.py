"""packed_attention in graphs of torch.compile: one graph for all documents, and the numbers of the definition.

Its kernels need a GPU, where `test_on_gpu.py` runs them; on a CPU the operator attends a document at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conformance.made import dims, ready
from tests.conformance.made import drawn as inputs
from tests.kernels.test_packed_attention import DOCUMENTS, drawn, packed
from xscale.core.config import decode
from xscale.nn.attention.softmax import Softmax
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens
from xscale_kernels import torch_private
from xscale_kernels.packed_attention import find_document_spans, op, packed_attention, varlen

BATCHES = [packed(20, 31, 13), packed(64), packed(1, 1, 1, 61), packed(*[4] * 16)]


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    torch.compiler.reset()
    counters.clear()
    yield lambda: int(counters["stats"]["unique_graphs"])
    torch.compiler.reset()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_output_and_gradients_are_the_definitions(name: str, causal: bool) -> None:
    documents = DOCUMENTS[name]
    qkv = drawn(documents.shape[1], B=len(documents))
    above = torch.randn_like(qkv[0])
    ours = varlen.attend(*qkv, find_document_spans(documents), causal)
    exact = packed_attention(*qkv, documents, causal=causal, implementation="reference")
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)
    both = (torch.autograd.grad(out, qkv, above) for out in (ours, exact))
    for gradient, expected in zip(*both, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def test_one_graph_serves_all_documents(graphs: Callable[[], int]) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def compiled(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, spans: Any) -> Tensor:
        return packed_attention(q, k, v, documents, causal=True, implementation="torch", spans=spans)

    for documents in BATCHES:
        qkv = drawn(64)
        out = compiled(*qkv, documents, find_document_spans(documents))
        exact = packed_attention(*qkv, documents, causal=True, implementation="reference")
        torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-11)
        for ours, expected in zip(*(torch.autograd.grad(x.sum(), qkv) for x in (out, exact)), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    assert graphs() == 1


def test_a_compiled_layer_attends_by_it(graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the core may, as on a GPU: one graph for all documents too, and the layer's numbers."""
    layer = ready(Attention(decode(Attention.Config, {"heads": 4, "kv_heads": 2}), dims(length=64)))
    x = inputs(1, 64, 32).requires_grad_()
    wanted = [layer(x, Tokens.from_ids(torch.zeros_like(documents), documents)) for documents in BATCHES]
    monkeypatch.setattr(Softmax, "_uses_packed_kernel", lambda self, q, k, v, mask: mask.spans is not None)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for documents, expected in zip(BATCHES, wanted, strict=True):
        tokens = Tokens.from_ids(torch.zeros_like(documents), documents)
        spans = find_document_spans(documents)
        tokens.shared_values.get_or_compute("document_spans", lambda spans=spans: spans)
        torch.testing.assert_close(compiled(x, tokens), expected, rtol=1e-9, atol=1e-11)
    assert graphs() == 1


def test_the_operator_is_registered_whole() -> None:
    """Its schema, its shapes without data, and its gradients under the compiler."""
    spans = find_document_spans(packed(5, 3))
    q, k, v = (torch.randn(8, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    torch.library.opcheck(torch.ops.xscale.varlen_attention, (q, k, v, spans.offsets, spans.sizes, True))


def test_the_calls_for_a_gpu_fit_torch() -> None:
    """Fake tensors check arguments and shapes; the numbers are tested on a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(64, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        offsets = torch.empty(4, device="cuda", dtype=torch.int32)
        out, lse = torch_private.flash_varlen(q, k, v, offsets, 31, varlen.CAUSAL)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 64), torch.float32)
        gradients = torch_private.flash_varlen_backward(out, q, k, v, out, lse, offsets, 31, varlen.CAUSAL)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


def test_torch_compile_traces_whether_it_runs(graphs: Callable[[], int]) -> None:
    """The question is answered once, when the graph is made."""

    @torch.compile(backend="eager", fullgraph=True)
    def is_new_enough(x: Tensor) -> Tensor:
        return x + 1 if op._major_capability() >= 8 else x - 1

    assert is_new_enough(torch.zeros(1)).item() == (1 if op._major_capability() >= 8 else -1)
