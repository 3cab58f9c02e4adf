"""Every Triton kernel compiles to Hopper machine code, without a GPU: what the interpreter lets pass, this does not."""

import ast
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]
# Bytes of registers that a thread may store to memory, by kernel and shape class; all others may none. Versions of
# Triton assign registers differently: these are 3.7.1's, and behind them what 3.6 needs beyond them.
SPILL_LIMITS = {
    ("block_sparse_attention.gradients._key_kernel", "block_64_K=256"): 24,
    ("grouped_gemm.triton._product_kernel", "float32"): 24,
    ("linear_attention.triton._chunk_kernel", "K=64,_gates,_documents,_state"): 100,
    ("linear_attention.triton._chunk_kernel", "K=128,_gates,_documents,_state"): 124,
    ("norm_kernels._backward_kernel", "layernorm_D=16384"): 12,
    **{("norm_kernels._forward_kernel", f"rmsnorm_D={D}"): 4 for D in (5120, 6144, 7168, 8192)},
}
SPILL_LIMITS_3_6 = {
    ("block_sparse_attention.gradients._key_kernel", "block_64_K=128"): 16,
    ("block_sparse_attention.gradients._key_kernel", "split_columns,_block_64_K=128"): 16,
    ("linear_attention.triton._chunk_kernel", "K=128,_gates,_documents,_state"): 160,
}


def spill_limits(version: str) -> dict[tuple[str, str], int]:
    """The limits for a version of Triton."""
    older = tuple(int(number) for number in version.split(".")[:2]) < (3, 7)
    return SPILL_LIMITS | (SPILL_LIMITS_3_6 if older else {})


def test_an_older_triton_may_spill_more() -> None:
    older, newer = spill_limits("3.6.0"), spill_limits("3.7.1")
    assert newer == SPILL_LIMITS
    assert older.keys() == newer.keys() | SPILL_LIMITS_3_6.keys()
    assert all(older[key] >= limit for key, limit in newer.items())


def launched(package: Path) -> set[str]:
    """Every Triton kernel of the package: what is compiled by itself ends in _kernel, the rest is inlined."""
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(one) for one in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
            if "triton.jit" in marks and node.name.endswith("_kernel"):  # type: ignore[attr-defined]
                module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
                found.add(f"{module}.{node.name}")  # type: ignore[attr-defined]
    return found


def _words(line: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in line.split()[1:])


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's wheel brings an assembler for x86-64 hosts only")
def test_kernels_compile_for_hopper() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.lower_for_hopper"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0
    lines = [(line.split()[0], _words(line)) for line in done.stdout.splitlines()]
    kernels = {f"xscale_kernels.{line.split()[0]}" for line in done.stdout.splitlines()}
    assert kernels == launched(ROOT / "kernels/xscale_kernels")
    spilled = {(kernel, words["shape"]): int(words["spilled"]) for kernel, words in lines}
    limits = spill_limits(metadata.version("triton"))
    assert spilled.keys() >= limits.keys()
    more = {key: spills for key, spills in spilled.items() if spills > limits.get(key, 0)}
    assert not more, more
    # Half-precision products use Hopper's own instruction.
    assert any("_product_kernel" in line and "wgmma" in line for line in done.stdout.splitlines())
