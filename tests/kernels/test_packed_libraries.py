"""packed_attention by flash-attn and by torch's attention over sequences of any length, against the definition.

Their kernels need a GPU. The stand-ins have the functions, signatures and checks of their sources and compute a
sequence at a time on the CPU, so a wrong unit, layout or cut shows as a number; `test_on_gpu.py` runs the real ones.
"""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_packed_attention import DOCUMENTS, drawn, packed
from xscale_kernels import refusals
from xscale_kernels.packed_attention import find_document_spans, packed_attention
from xscale_kernels.packed_attention.op import IMPLEMENTATIONS, LIBRARIES, library_refusals
from xscale_kernels.select import UnusableError

CALLS: list[tuple[int, int]] = []
"""Sequences and longest length of each call of a stand-in."""


class Varlen(torch.autograd.Function):
    """Attention in sequences cut at `cu_seqlens`, with the checks of the kernels and a backward of its own."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, cut: list[int], causal: bool) -> Tensor:
        outputs = []
        for start, end in pairwise(cut):
            rows = []
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                scores = q[start:end, h] @ k[start:end, g].T / q.shape[2] ** 0.5
                if causal:
                    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
                rows.append(scores.softmax(-1) @ v[start:end, g])
            outputs.append(torch.stack(rows, 1))
        return torch.cat(outputs)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool) -> Tensor:
        assert cu_seqlens.dtype == torch.int32
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        cut = cu_seqlens.tolist()
        assert cut[0] == 0
        assert cut[-1] == len(q) == len(k) == len(v)
        # Queries beyond it would have no block of the grid.
        assert max(end - start for start, end in pairwise(cut)) <= longest
        CALLS.append((len(cut) - 1, longest))
        ctx.cut, ctx.causal = cut, causal
        ctx.save_for_backward(q, k, v)
        return Varlen.attend(q, k, v, cut, causal)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = Varlen.attend(*qkv, ctx.cut, ctx.causal)
        return *torch.autograd.grad(out, qkv, dout), None, None, None


def apply(q: Tensor, k: Tensor, v: Tensor, cut: Tensor, longest: int, causal: bool) -> Tensor:
    out: Tensor = Varlen.apply(q, k, v, cut, longest, causal)  # type: ignore[no-untyped-call]
    return out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:  # fmt: skip
    assert (dropout_p, softmax_scale, alibi_slopes) == (0.0, None, None)
    assert (max_seqlen_q, deterministic) == (max_seqlen_k, torch.are_deterministic_algorithms_enabled())
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    return apply(q, k, v, cu_seqlens_q, max_seqlen_q, causal)


def flash_attn_3_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert (seqused_q, seqused_k, softmax_scale) == (None, None, None)
    assert (max_seqlen_q, deterministic) == (max_seqlen_k, torch.are_deterministic_algorithms_enabled())
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    return apply(q, k, v, cu_seqlens_q, max_seqlen_q, causal), torch.zeros(q.shape[1], len(q))


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Any = None, num_splits: Any = None,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size in ((-1, -1), (-1, 0))
    assert torch.equal(cu_seq_q, cu_seq_k)
    return apply(query, key, value, cu_seq_q, max_q, window_size == (-1, 0))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    for path in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules["flash_attn"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn_interface"].flash_attn_varlen_func = flash_attn_3_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries run on this CPU, which takes float64."""
    monkeypatch.setattr("xscale_kernels.packed_attention.op._takes_varlen", lambda q, k, v: None)
    monkeypatch.setattr(refusals, "unless_library", lambda x, package, capability: None)
    monkeypatch.setattr(refusals, "is_hopper", lambda x: True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_output_and_gradients_are_the_definitions(library: str, name: str, causal: bool, usable: None) -> None:
    documents = DOCUMENTS[name]
    qkv = drawn(documents.shape[1], B=len(documents))
    above = torch.randn_like(qkv[0])

    def both(implementation: str) -> tuple[Tensor, ...]:
        out = packed_attention(*qkv, documents, causal=causal, implementation=implementation)
        return out, *torch.autograd.grad(out, qkv, above)

    for ours, exact in zip(both(library), both("reference"), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)
    assert len(CALLS) == 1, "backward is the library's"


def test_torch_compile_is_refused(usable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name it gets what torch.compile can fuse."""
    qkv, documents = drawn(20), packed(12, 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for name in LIBRARIES:
        with pytest.raises(UnusableError, match=r"torch\.compile keeps 'torch' in its graphs, where the spans"):
            packed_attention(*qkv, documents, causal=True, implementation=name)
    packed_attention(*qkv, documents, causal=True)
    assert not CALLS


def test_spans() -> None:
    spans = find_document_spans(torch.tensor([[4, 4, 4, 7, 7], [7, 7, 7, 7, 7]]))
    assert (spans.offsets.tolist(), spans.sizes.tolist(), spans.order) == ([0, 3, 5, *[10] * 8], [3, 5], None)
    assert spans.offsets.dtype == torch.int32
    offsets, longest = spans.cut()
    assert (offsets.tolist(), longest) == ([0, 3, 5, 10], 5)
    scattered = find_document_spans(torch.tensor([[0, 0, 0], [1, 0, 1]]))
    assert scattered.order is not None
    assert (scattered.offsets.tolist(), scattered.sizes.tolist()) == ([0, 3, 4, 6, 6, 6, 6], [3, 3])
    assert scattered.order.tolist() == [0, 1, 2, 4, 3, 5]


def test_given_spans_are_taken(usable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads the documents then, which may be on a GPU."""
    qkv, documents = drawn(20), packed(12, 8)
    spans = find_document_spans(documents)
    of_op = sys.modules[packed_attention.__module__]
    monkeypatch.setattr(of_op, "find_document_spans", lambda documents: pytest.fail("the host reads documents"))
    out = packed_attention(*qkv, documents, causal=True, implementation="flash_attn", spans=spans)
    torch.testing.assert_close(out, packed_attention(*qkv, documents, causal=True, implementation="reference"))


def gpu(K: int = 64, M: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    tensors = []
    for heads, width in ((4, K), (2, K), (2, M)):
        each: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(1, heads, 9, width))
        each.numel = lambda: 9
        tensors.append(each)
    return tensors


def test_what_they_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    missing = {"flash_attn_interface": "no", "flash_attn_2_cuda": "no"}
    monkeypatch.setattr(refusals, "_absent", missing.get)
    assert [entry.name for entry in IMPLEMENTATIONS if entry.refusal(False, *gpu()) is None] == ["torch", "reference"]
    missing.clear()
    by_name = {entry.name: entry for entry in IMPLEMENTATIONS}
    for name in LIBRARIES:
        assert by_name[name].refusal(False, *gpu()) is None
        assert "bfloat16 or float16" in str(by_name[name].refusal(True, *gpu(dtype=torch.float32)))
        assert "values as wide as the keys" in str(by_name[name].refusal(True, *gpu(M=32)))
        assert "these have 264" in str(by_name[name].refusal(True, *gpu(264, 264)))
        assert "these have 20" in str(by_name[name].refusal(True, *gpu(20, 20)))
        assert "needs a GPU" in str(by_name[name].refusal(True, *(x.bfloat16() for x in drawn(9))))
    assert library_refusals(*gpu()) is None
    capability[0] = (10, 0)
    assert by_name["flash_attn"].refusal(False, *gpu()) is None
    assert "capability 9.x" in str(by_name["flash_attn_3"].refusal(False, *gpu()))
    capability[0] = (7, 5)
    assert [name for name, _ in library_refusals(*gpu()) or ()] == [*LIBRARIES]


@pytest.mark.parametrize(
    ("name", "command"),
    [("flash_attn", "a wheel of the releases of flash-attention"), ("flash_attn_3", "the folder hopper")],
)
def test_a_missing_library_says_how_it_is_installed(name: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refusals._absent.cache_clear()
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda package: None)
    (entry,) = (entry for entry in IMPLEMENTATIONS if entry.name == name)
    assert command in str(entry.refusal(True, *gpu()))
    refusals._absent.cache_clear()
