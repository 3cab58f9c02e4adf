"""Liger's and flash-linear-attention's own kernels, in the interpreter or on a GPU, against our definitions."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.kernels.conformance import BOUNDS, LAYOUTS, PAIRS, check, examples
from tests.kernels.triton.interpreter import complete
from xscale_kernels import refusals
from xscale_kernels.select import UnusableError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MODULES = {
    "liger": (
        "liger_kernel",
        "liger_kernel.ops.rms_norm",
        "liger_kernel.ops.layer_norm",
        "liger_kernel.ops.cross_entropy",
    ),
    "fla": (
        "fla",
        "fla.ops.common.chunk_h",
        "fla.ops.common.chunk_o",
        "fla.ops.common.chunk_delta_h",
        "fla.ops.gated_delta_rule.chunk_fwd",
        "fla.ops.gated_delta_rule.wy_fast",
        "fla.ops.utils.cumsum",
    ),
}
"""Library -> its package and the modules whose kernels run."""
SETTINGS = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def tf32() -> Iterator[None]:
    """Allow TF32, as which fla multiplies float32; in the interpreter its products are exact."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = INTERPRETED
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("operator", "name"), [pair for pair in PAIRS if pair[1] in MODULES])
def test_numbers_and_gradients(operator: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, *kernels = MODULES[name]
    pytest.importorskip(package, reason=f"{package} is not installed: {refusals.INSTALL[package]}")
    if INTERPRETED:
        complete(monkeypatch, *(importlib.import_module(path) for path in kernels))
        monkeypatch.setattr(refusals, "unless_library", lambda x, package, capability: None)
    served = 0

    @SETTINGS
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        nonlocal served
        example = data.draw(examples(operator))
        dtype, how = data.draw(st.sampled_from(list(BOUNDS))), data.draw(st.sampled_from(LAYOUTS))
        # The interpreter's product of bfloat16 multiplies bit patterns.
        assume(not (INTERPRETED and name == "fla" and dtype is torch.bfloat16))
        try:
            check(example, name, dtype, how, device)
        except UnusableError:
            assume(False)
        served += 1

    run()
    assert served >= 3
