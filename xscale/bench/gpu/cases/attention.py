"""Job J5: causal attention from 4k to 64k tokens: torch's SDPA by backend, FlexAttention, and sparse cores."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xscale.bench.attention import WIDTH, core_run, multiply_adds, sdpa_sides
from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.gpu.cases.packed import SECONDS, Call, draw_qkv, report_attention
from xscale.bench.harness.machine import BenchDevice
from xscale.bench.harness.timing import milliseconds_of, peak_bytes, time_calls
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.flex import KERNEL_BLOCK, FlexAttention, KeyBlocks
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.pattern.pattern import PATTERNS
from xscale_kernels.packed_attention.op import packed_attention
from xscale_kernels.select import UnusableError

LENGTHS = (4096, 8192, 16384, 32768, 65536)
TOKENS = 16384
"""Tokens of a case: shorter sequences come several at once."""
HEADS, HEAD_WIDTH = 48, 128
GOALS = {4096: ">= 490 TFLOP/s", 8192: ">= 570 TFLOP/s"}
SPARSE_HEADS = 16
PATTERN_NAMES = ("window", "bigbird", "longformer", "fixed", "strided")
CORE_NAMES = ("linear", "performer", "delta", "rfa", "nsa", "moba", "local_transformer")


def cases(context: GpuContext) -> list[GpuCase]:
    """Dense attention at each length, then sparse cores at each length."""
    lengths = context.size(LENGTHS, (128, 256))
    dense = [
        GpuCase(f"dense, T={T}", partial(_dense, context, T), 60.0, GOALS.get(T, ""))
        for T in lengths
    ]
    return dense + [
        GpuCase(f"sparse, T={T}", partial(_sparse, context, T), 60.0) for T in reversed(lengths)
    ]


def _dense(context: GpuContext, T: int, report: CaseReporter) -> None:
    B, H, K = context.size((max(1, TOKENS // T), HEADS, HEAD_WIDTH), (1, 2, 32))
    shape = (B, H, T, K)
    q, k, v = draw_qkv(context, shape, shape)
    mask = AttentionMask(T, T, causal=True)
    flex, blocks = FlexAttention(KERNEL_BLOCK, None), KeyBlocks.of_mask(mask, context.torch_device)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (reason := flex.why_unsupported(q)) is not None:
            raise UnusableError(reason)
        return flex.attend(q, k, v, mask, blocks)

    def by_library(name: str) -> Call:
        documents = torch.zeros(B, T, dtype=torch.int64, device=q.device)
        return lambda q, k, v: packed_attention(
            q, k, v, documents, causal=True, implementation=name
        )

    libraries = {name: by_library(name) for name in ("flash_attn_3", "flash_attn")}
    sides: Mapping[str, Call] = {**sdpa_sides(), "FlexAttention": by_flex, **libraries}
    values: dict[str, Any] = {"case": f"dense, B={B} H={H} T={T} K={K}", "at": {"length": T}}
    report_attention(report, context, sides, (q, k, v), 14.0 * B * H * K * T * T / 2, **values)


def _sparse(context: GpuContext, T: int, report: CaseReporter) -> None:
    heads = context.size(SPARSE_HEADS, 1)
    configs: dict[str, Any] = {
        f"block_sparse {name}": BlockSparse.Config(pattern=PATTERNS.get(name).part.Config())
        for name in PATTERN_NAMES
        if name in {pattern.name for pattern in PATTERNS}
    }
    configs |= {
        entry.name: entry.part.Config()
        for entry in CORES
        if entry.name in CORE_NAMES and entry.traits.causal
    }
    configs = {"softmax": CORES.get("softmax").part.Config(), **configs}
    for name, config in configs.items():
        report.measure(name, partial(_core, context, config, T, heads))


def _core(context: GpuContext, config: Any, T: int, heads: int) -> Mapping[str, Any]:
    run = core_run(config, T, True, heads, BenchDevice(context.torch_device, context.dtype))
    run()
    peak = peak_bytes(run, context.device)
    timings = time_calls({"": run}, context.device, context.size(SECONDS, 0.0))
    milliseconds = milliseconds_of(timings, "", context.device)
    return {
        "case": f"sparse, H={heads} T={T} K={WIDTH}",
        "at": {"length": T},
        "milliseconds": milliseconds,
        "fastest_milliseconds": timings.fastest("") * 1e3,
        "tflops": 6.0 * multiply_adds(config, T, True, heads) / milliseconds / 1e9,
        "megabytes": peak / 2**20,
    }
