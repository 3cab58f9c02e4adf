"""Compiles every Triton kernel to Hopper machine code, with no GPU: what the interpreter lets pass, this does not.

Run as a program; prints one line a compiled kernel: name, shape class, shared memory, spilled bytes, tensor-core
instruction. test_lowering.py reads it; hopper_table.py makes the README's table of the same rows.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.hopper_table import HopperRow, Load, measured
from tests.kernels.sass import Machine

SHARED_LIMIT = 232448


class Hopper:
    """The part of a driver that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Recorder:
    """Compiles instead of launching, and keeps a row for each kernel of each shape class."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], HopperRow] = {}
        self.shape = ""
        self.loads: dict[str, Load] = {}

    def at(self, shape: str, **loads: Load) -> None:
        """Name the shape class of the calls that follow, and what a full-size call of each kernel does."""
        self.shape, self.loads = shape, loads

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(function, *args, grid=grid, warmup=True, **kwargs)
        name = f"{function.fn.__module__}.{function.__name__}".removeprefix("xscale_kernels.")
        if (name, self.shape) in self.rows:
            return kernel
        shared = kernel.metadata.shared
        assert shared <= SHARED_LIMIT, f"{name} wants {shared} bytes of shared memory"
        machine = Machine(kernel.asm["ptx"], shared, kernel.metadata.num_warps)
        row = measured(
            name, self.shape, machine, self.loads.get(function.__name__.strip("_").removesuffix("_kernel") or "kernel")
        )
        self.rows[name, self.shape] = row
        print(
            f"{name} shape={self.shape.replace(' ', '_')} registers={row.registers} shared={shared} "
            f"spilled={row.spilled[0]} products={row.products or '-'}",
            file=sys.stderr if __name__ != "__main__" else sys.stdout,
            flush=True,
        )
        return kernel


original = JITFunction.run
RECORDER = Recorder()
at = RECORDER.at


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def pointwise_load(elements: float, a_program: int, bytes_of_one: float) -> Load:
    """Load of a kernel without a loop."""
    return Load(elements / a_program, 0, elements * bytes_of_one, elements * bytes_of_one)


def grouped_gemm() -> None:
    from xscale_kernels.grouped_gemm import triton as kernels

    counts = torch.full((4,), 128)
    M, D, F = 32768, 4096, 14336
    least, flops = 2.0 * (M * D + 8 * D * F + M * F), 2.0 * M * D * F
    for dtype in (torch.bfloat16, torch.float32):
        x, w, dy = draw(512, 256, dtype=dtype), draw(4, 384, 256, dtype=dtype), draw(512, 384, dtype=dtype)
        half = dtype is torch.bfloat16
        product = Load(M // 128 * F // 128, D // 64, least, least, flops)
        outer = Load(8 * F // 128 * D // 128, M // 8 // 64, least, least, flops)
        at(f"{dtype}"[6:], **({"product": product, "outer": outer} if half else {}))
        kernels.forward(x, w, counts)
        kernels.outer(dy, x, counts)
    at("bfloat16, small groups")
    kernels.forward(draw(128, 256), draw(4, 384, 256), torch.full((4,), 32))


def permute() -> None:
    from xscale_kernels.permute import triton as kernels

    tokens, weights = torch.zeros(8, dtype=torch.int64), draw(8, dtype=torch.float32)
    M, N, D = 131072, 65536, 4096
    at("D=4096", sum=Load(N * 4, 2, 2.0 * (M + N) * D, 2.0 * (M + N) * D), spread=Load(M, 4, 6.0 * M * D, 6.0 * M * D))
    kernels.unpermute(draw(8, 4096), tokens, weights, 4)
    kernels.spread(draw(4, 4096), draw(8, 4096), tokens, weights)


def cross_entropy() -> None:
    from xscale_kernels.cross_entropy import LossTerms
    from xscale_kernels.cross_entropy import triton as kernels

    losses, targets = draw(8, dtype=torch.float32), torch.zeros(8, dtype=torch.int64)
    N, V = 8192, 131072
    for name, terms in (("", LossTerms()), (", all terms", LossTerms(softcap=30.0, z_loss=1e-4, label_smoothing=0.1))):
        logits = draw(8, V)
        for kind, passes in (("forward", 1), ("forward and gradient", 3), ("gradient", 2)):
            load = Load(N, V / 4096 * (2 if passes == 3 else 1), 2.0 * passes * N * V, 2.0 * min(passes, 2) * N * V)
            at(f"V=131072, {kind}{name}", **({} if name else {"kernel": load}))
            if kind == "gradient":
                kernels.backward(logits, targets, losses, losses, terms)
            elif kind == "forward":
                kernels.launch(logits, targets, losses, losses, None, None, terms, known=False)
            else:
                kernels.launch(logits, targets, losses, losses, losses, logits, terms, known=False)


def norms() -> None:
    from xscale_kernels.norm_kernels import layernorm, rmsnorm

    N, programs = 16384, 3 * 132
    for D in (2560, 3072, 4096, 5120, 6144, 7168, 8192, 16384):
        size, resident = float(N * D), programs if D <= 4096 else 132
        forward = Load(N, 0, 4 * size, 4 * size)
        backward = Load(resident, N / resident, 6 * size + 8.0 * resident * D, 6 * size)
        x, w = draw(8, D), draw(D, dtype=torch.float32)
        at(f"rmsnorm D={D}", forward=forward, backward=backward)
        rmsnorm(x, w, 1e-6).sum().backward()
        if D in (3072, 4096, 5120, 6144, 7168, 16384):
            at(f"layernorm D={D}", forward=forward, backward=backward)
            layernorm(x, w, w, 1e-6).sum().backward()
    x, w = draw(8, 7168, dtype=torch.float32), draw(7168, dtype=torch.float32)
    at("rmsnorm D=7168 float32")
    rmsnorm(x, w, 1e-6).sum().backward()


def pointwise() -> None:
    from xscale_kernels.bias_dropout_residual import triton as residual
    from xscale_kernels.gated_activation import KINDS
    from xscale_kernels.gated_activation import triton as gate
    from xscale_kernels.rope import triton as rope

    angles, size = torch.zeros(16, 64), 8.0 * 4096 * 32 * 128
    for interleaved in (False, True):
        at("interleaved, H=32 K=128" if interleaved else "halves, H=32 K=128", kernel=pointwise_load(size, 4096, 4))
        rope.rope(draw(2, 16, 32, 128), angles, angles, interleaved).sum().backward()
    at("halves of 128 of K=192")
    rope.rope(draw(2, 16, 8, 192), angles, angles, False).sum().backward()
    for kind in KINDS:
        at(f"{kind} F=14336")
        gate.gated_activation(draw(8, 14336), draw(8, 14336), kind).sum().backward()
    at("swiglu, halves of 2048")
    gate.halves_backward(draw(8, 1024), draw(8, 2048), "swiglu")
    size = 8192.0 * 4096
    at("D=4096", forward=pointwise_load(size, 1024, 6), backward=pointwise_load(size, 1024, 4))
    residual.bias_dropout_residual(draw(8, 4096), draw(8, 4096), draw(4096), 0.1).sum().backward()


def router() -> None:
    from xscale_kernels.router import triton as kernels

    for E, k, score in ((8, 2, "softmax"), (64, 8, "softmax"), (256, 8, "sigmoid")):
        at(f"{score} E={E} k={k}")
        scores, weights, _ = kernels.route(draw(64, E, dtype=torch.float32), k, torch.zeros(E), score)
        (scores.sum() + weights.sum()).backward()
    at("k=2")
    for order in ("choice", "token"):
        kernels.slots(torch.zeros(512, 2, dtype=torch.int64), 8, order=order)


def adamw() -> None:
    from xscale_kernels.adamw import triton as kernels
    from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters

    for dtype, moved in ((torch.bfloat16, 26.0), (torch.float32, 28.0)):
        # Of a block that is masked and one that is not, a program executes one.
        at(
            f"gradients {dtype}"[:25].replace("torch.", ""),
            kernel=Load(1e8 / 2048, 0, moved * 1e8, moved * 1e8, 0, 0.5),
        )
        roles = [[draw(5000, dtype=each)] for each in (torch.float32, dtype, torch.float32, torch.float32)]
        kernels.step_(*roles, torch.ones(1), AdamWHyperparameters(1, 1e-3, 0.9, 0.95, 1e-8, 0.1))


def squared_norm() -> None:
    from xscale_kernels.squared_norm import triton as kernels

    for dtype, moved in ((torch.float32, 4.0), (torch.bfloat16, 2.0)):
        at(f"{dtype}"[6:], kernel=Load(1e9 / 8192, 0, moved * 1e9, moved * 1e9, 0, 0.5))
        kernels.squared_norm([draw(5000, dtype=dtype), draw(3, 7, dtype=dtype)])


def block_sparse_attention() -> None:
    from xscale_kernels.block_sparse_attention import layout_from_mask
    from xscale_kernels.block_sparse_attention import triton as kernels
    from xscale_kernels.block_sparse_attention.op import ScoreModifier

    documents, slopes = torch.zeros(1, 256, dtype=torch.int32), torch.zeros(4)
    causal, every = ScoreModifier(0.1, True), ScoreModifier(0.1, True, 30.0, slopes, documents, documents)
    for block, K, rule in (
        (64, 128, causal),
        (128, 64, causal),
        (128, 128, causal),
        (64, 256, causal),
        (64, 64, every),
    ):
        layout = layout_from_mask(torch.ones(1, 256 // block, 256 // block, dtype=torch.bool), block)
        q, k, v = draw(1, 4, 256, K), draw(1, 2, 256, K), draw(1, 2, 256, K)
        at(f"block {block} K={K}{'' if rule is causal else ', documents, slopes, cap'}", **attention_loads(block, K))
        out, lse = kernels.forward(q, k, v, layout, rule)
        kernels.backward(q, k, v, out, lse, out, layout, rule)
    at("split columns, block 64 K=128")
    mask = torch.eye(300, dtype=torch.bool)[None]
    mask[:, :, 0] = True
    q = draw(1, 4, 300 * 64, 128)
    kernels.backward(q, q, q, q, draw(1, 4, 300 * 64, dtype=torch.float32), q, layout_from_mask(mask, 64), causal)


def attention_loads(block: int, K: int) -> dict[str, Load]:
    """B=1 H=32 T=32768, a window of 8 blocks: the bytes of q, k, v and their results; keys and values are in L2."""
    H, T = 32, 32768
    rows, steps, size = H * T / block, 8.0, 2.0 * H * T * K
    flops = rows * steps * 2.0 * block * block * K
    return {
        "forward": Load(rows, steps, 4 * size, 4 * size, 2 * flops),
        "query": Load(rows, steps, 5 * size, 5 * size, 3 * flops),
        "key": Load(rows, steps * max(1, block // 32), 6 * size, 6 * size, 4 * flops),
        "delta": Load(rows * block * K / 4096, 0, 2 * size, 2 * size),
    }


def linear_attention() -> None:
    from xscale_kernels.linear_attention import triton as kernels

    for width in (64, 128):
        q, k, v = (draw(1, 4, 256, width) for _ in range(3))
        gates, documents = torch.zeros(1, 4, 256), torch.zeros(1, 256, dtype=torch.int64)
        at(f"K={width}")
        kernels.scan(q, k, v, None, None, None, False, 64)
        at(f"K={width}, gates, documents, state")
        kernels.scan(q, k, v, gates, documents, torch.zeros(1, 4, width, width), True, 64)
        at(f"K={width}, segments")
        kernels.scan(q, k, v, None, None, None, False, 64, 2)


CASES: tuple[Callable[[], None], ...] = (
    grouped_gemm, permute, cross_entropy, norms, pointwise, router, adamw, squared_norm, block_sparse_attention,
    linear_attention,
)  # fmt: skip


def compile_all(names: list[str]) -> Iterator[list[HopperRow]]:
    """Compile the named cases, or all; yield the rows of each case, one for each kernel of each shape class."""
    driver.set_active(Hopper())
    JITFunction.run = lambda function, *args, **kwargs: RECORDER.run(function, *args, **kwargs)
    for case in CASES:
        if not names or case.__name__ in names:
            known = len(RECORDER.rows)
            case()
            yield list(RECORDER.rows.values())[known:]


if __name__ == "__main__":
    for _ in compile_all(sys.argv[1:]):
        pass
