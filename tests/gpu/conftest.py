"""The device of the tests on a GPU: --gpu-device=cpu runs their machinery on a CPU."""

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that is compared with the CPU."""
    return torch.device(request.config.getoption("--gpu-device"))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """A product in TF32 is as coarse as bfloat16; here float32 is meant."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
