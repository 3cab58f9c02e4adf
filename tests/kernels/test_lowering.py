"""Every Triton kernel compiles to Hopper machine code, without a GPU: what the interpreter lets pass, this does not."""

import ast
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]
# Bytes of registers a thread may spill: the gradients of keys and values spill most, outside of their loops mostly.
SPILL_LIMIT = 124


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
    lines = [dict(word.partition("=")[::2] for word in line.split()[1:]) for line in done.stdout.splitlines()]
    kernels = {f"xscale_kernels.{line.split()[0]}" for line in done.stdout.splitlines()}
    assert kernels == launched(ROOT / "kernels/xscale_kernels")
    for line in lines:
        assert int(line["spilled"]) <= SPILL_LIMIT, line
    # Half-precision products use Hopper's own instruction.
    assert any("_product_kernel" in line and "wgmma" in line for line in done.stdout.splitlines())
