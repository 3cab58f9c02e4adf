"""Job J8: greedy decoding at batch 1 against transformers, with the same weights, by each kind of KV cache."""

from dataclasses import replace
from functools import partial
from typing import Any

from xscale.bench.decode import DecodeSizes, bench_model
from xscale.bench.gpu.case import CaseReporter, GpuCase, GpuContext
from xscale.bench.harness.machine import BenchDevice

TOY = DecodeSizes(
    width=16,
    hidden=32,
    depth=1,
    heads=2,
    kv_heads=1,
    experts=2,
    top_k=1,
    vocabulary=32,
    prompt=3,
    tokens=4,
)
GPT2 = DecodeSizes(
    width=768, hidden=3072, depth=12, heads=12, kv_heads=12, vocabulary=50257, prompt=32, tokens=128
)
SIZES = {
    "gpt2": GPT2,
    "llama": replace(
        GPT2, width=2048, hidden=5632, depth=16, heads=16, kv_heads=8, vocabulary=32000
    ),
    "mixtral": replace(
        GPT2, width=1024, hidden=2816, depth=8, heads=16, kv_heads=8, vocabulary=32000
    ),
    "t5": replace(GPT2, vocabulary=32128),
}
"""GPT-2 has the sizes of its smallest model, 124M."""


def cases(context: GpuContext) -> list[GpuCase]:
    """One case for each model."""
    return [
        GpuCase(
            name,
            partial(_run, context, name),
            seconds=150.0,
            headline="GPT-2, batch 1: >= 767 tokens/s on an H200" if name == "gpt2" else "",
        )
        for name in SIZES
    ]


def _run(context: GpuContext, name: str, report: CaseReporter) -> None:
    sizes = context.size(SIZES[name], TOY)
    on = BenchDevice(context.torch_device, context.dtype)
    # Each compilation takes a minute: of the model of the goal, and of one that is bound by its memory.
    compiled = on.on_gpu and name in ("gpt2", "llama")
    result: dict[str, Any] | None = report.attempt(
        "xscale", lambda: bench_model(name, sizes, context.size(3, 1), on, compiled=compiled)
    )
    if result is None:
        return
    speeds = result["tokens_per_second" if on.on_gpu else "tokens_per_processor_second"]
    case = (
        f"{name}, {result['parameters'] / 1e6:.0f}M, prompt {sizes.prompt}, {sizes.tokens} tokens"
    )
    values = {"case": case, "speedup": result["ratio"], "baseline": "transformers"}
    report.figure("xscale", tokens_per_second=speeds.pop("xscale"), **values)
    for side, speed in speeds.items():
        report.figure(side, case=case, tokens_per_second=speed)
