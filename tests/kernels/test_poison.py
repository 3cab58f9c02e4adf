"""The poison itself: the fixture that the other kernel tests rely on does fill new memory."""

import torch


def test_new_memory_is_nan() -> None:
    assert torch.empty(7).isnan().all()
    assert torch.zeros(3).new_empty(7).isnan().all()
    assert torch.empty_like(torch.zeros(5)).isnan().all()
