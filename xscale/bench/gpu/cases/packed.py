"""Job J3: attention in packed documents, by variable-length kernels and by FlexAttention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.harness.timing import milliseconds_of, peak_bytes, time_calls
from xscale.nn.attention.ops.flex import KERNEL_BLOCK, FlexAttention, KeyBlocks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale_kernels.cases import ForwardBackward
from xscale_kernels.packed_attention.op import COMPILED, IMPLEMENTATIONS, packed_attention
from xscale_kernels.packed_attention.spans import find_document_spans
from xscale_kernels.select import UnusableError

SHAPES = ((4, 4096, 16, 16, 128, 8), (1, 16384, 32, 8, 128, 8), (1, 65536, 16, 16, 128, 32))
"""Sequences, tokens, heads, kv heads, head width, documents of a sequence; the first is configs/run/dense_1b.yaml."""
SECONDS = 0.5
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each shape."""
    shapes = context.size(SHAPES, ((1, 256, 4, 2, 32, 4),))
    return [
        GpuCase(
            f"B={B} T={T} H={H} kv={G} K={K} documents={d}",
            partial(_run, context, (B, T, H, G, K, d)),
            60.0,
        )
        for B, T, H, G, K, d in shapes
    ]


def _run(context: GpuContext, shape: tuple[int, ...], report: CaseReporter) -> None:
    B, T, H, G, K, count = shape
    documents = document_ids(B, T, count, context.torch_device)
    flops = 14.0 * H * K * visible_pairs(documents)
    q, k, v = draw_qkv(context, (B, H, T, K), (B, G, T, K))
    report_attention(report, context, packed_sides(documents, context), (q, k, v), flops)


def document_ids(B: int, T: int, count: int, device: torch.device) -> Tensor:
    """Draw [B, T] documents of unequal lengths, about `count` in a sequence."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(B, T, generator=generator) < count / T
    return starts.long().cumsum(1).to(device)


def visible_pairs(documents: Tensor) -> float:
    """Count the pairs of a query and a key of the same document, the query not before the key; documents [B, T]."""
    apart = (
        documents
        + (documents.max() + 1) * torch.arange(len(documents), device=documents.device)[:, None]
    )
    lengths = apart.flatten().bincount().double()
    return float((lengths * (lengths + 1) / 2).sum())


def draw_qkv(
    context: GpuContext, of_queries: tuple[int, ...], of_keys: tuple[int, ...]
) -> list[Tensor]:
    """Draw q, k and v, which require gradients."""
    generator = torch.Generator(context.device).manual_seed(0)
    return [
        torch.randn(
            shape, generator=generator, device=context.device, dtype=context.dtype
        ).requires_grad_()
        for shape in (of_queries, of_keys, of_keys)
    ]


def packed_sides(documents: Tensor, context: GpuContext) -> Mapping[str, Call]:
    """Return the ways to attend in packed documents."""
    T = documents.shape[1]
    mask = AttentionMask(T, T, causal=True, query_documents=documents, key_documents=documents)
    flex, blocks = FlexAttention(KERNEL_BLOCK, None), KeyBlocks.of_mask(mask, documents.device)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _require_flex(flex, q)
        return flex.attend(q, k, v, mask, blocks)

    def by_flex_with_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _require_flex(flex, q)
        return flex.attend(q, k, v, mask, KeyBlocks.of_mask(mask, documents.device))

    def variable_length(implementation: str) -> Call:
        return lambda q, k, v: packed_attention(
            q, k, v, documents, causal=True, implementation=implementation
        )

    spans = find_document_spans(documents).to(documents.device)

    def in_a_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(
            q, k, v, documents, causal=True, implementation=COMPILED, spans=spans
        )

    names = [entry.name for entry in IMPLEMENTATIONS if entry.name not in ("reference", "cpu")]
    sides: dict[str, Call] = {
        "causal, without documents": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        ),
        "FlexAttention, block mask at each call": by_flex_with_blocks,
        "FlexAttention, block mask kept": by_flex,
        **{f"variable length, {name}": variable_length(name) for name in names},
    }
    if documents.is_cuda:
        sides[f"variable length, {COMPILED}, under torch.compile"] = torch.compile(
            in_a_graph, dynamic=False
        )
    return sides


def _require_flex(flex: FlexAttention, q: Tensor) -> None:
    if (reason := flex.why_unsupported(q)) is not None:
        raise UnusableError(reason)


def report_attention(
    report: CaseReporter,
    context: GpuContext,
    sides: Mapping[str, Call],
    qkv: list[Tensor] | tuple[Tensor, ...],
    flops: float,
    **values: Any,
) -> None:
    """Report forward and backward of each side, one side after another."""
    for name, attend in sides.items():
        report.measure(name, partial(time_attention, context, attend, qkv, flops, values))


def time_attention(
    context: GpuContext,
    attend: Call,
    qkv: list[Tensor] | tuple[Tensor, ...],
    flops: float,
    values: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return the figures of forward and backward, and those of forward alone."""
    both = ForwardBackward(attend, list(qkv))
    both()
    peak = peak_bytes(both, context.device)
    timings = time_calls({"": both}, context.device, context.size(SECONDS, 0.0))
    milliseconds = milliseconds_of(timings, "", context.device)
    return {
        "milliseconds": milliseconds,
        "fastest_milliseconds": timings.fastest("") * 1e3,
        "tflops": flops / milliseconds / 1e9,
        "megabytes": peak / 2**20,
        **values,
    }
