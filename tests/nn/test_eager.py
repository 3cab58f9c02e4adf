"""Functions that a compiler leaves out: run as they stand between two graphs, and marked without loading the
compiler."""

import subprocess
import sys

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from xscale.nn.compiling.eager import eager


def test_it_runs_outside_the_graphs() -> None:
    seen: list[bool] = []

    @eager
    def scaled(x: Tensor, by: float) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * by * float(x.detach().numpy().sum())

    def whole(x: Tensor) -> Tensor:
        return scaled(x + 1, by=2.0) * 3

    x = torch.arange(4.0, requires_grad=True)
    counter = CompileCounter()
    torch.testing.assert_close(torch.compile(whole, backend=counter)(x), whole(x))
    assert seen == [False, False]
    assert counter.frame_count == 2


def test_a_config_is_checked_without_the_compiler() -> None:
    said = "import sys, xscale.recipe; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0
