"""The order of attention's backends on a GPU: the fastest that was measured, for the time of a run."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from xscale_kernels.attention_backends import MEASURED, attention_backends, sentences

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CUDNN_FIRST = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = attention._cur_sdpa_kernel_backends(with_priority=True)
    return found


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [(GPU, (9, 0), CUDNN_FIRST), (GPU, (8, 0), None), (GPU, (12, 0), None), (CPU, (9, 0), None)],
    ids=["Hopper", "Ampere", "not measured", "CPU"],
)
def test_the_order(
    device: torch.device,
    capability: tuple[int, int],
    expected: list[SDPBackend] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = order()
    with attention_backends(device):
        assert order() == (expected or before)
    assert order() == before
    line = "Attention without packed documents: cudnn first, then flash, efficient, math"
    assert sentences(device) == ([line] if expected else [])


def test_no_backend_is_lost() -> None:
    """A call that the first refuses, such as one in float32, finds another."""
    assert all(set(names) == {"cudnn", "flash", "efficient", "math"} for names in MEASURED.values())
