"""Collectives of the training process group: messages are tensors on the device, never pickled objects."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import Pool
from xscale.mesh.collectives import all_gather_columns

OBJECT_COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError("NCCL would pickle it, copy it to the GPU and wait for each rank")


def gathered(sizes: list[int]) -> Tensor:
    rank = dist.get_rank()
    local = torch.arange(2 * sizes[rank], dtype=torch.float64).view(2, -1) + 100 * rank
    with pytest.MonkeyPatch.context() as patch:
        for name in OBJECT_COLLECTIVES:
            patch.setattr(dist, name, refuse)
        return all_gather_columns(local, torch.device("cpu"))


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [0, 0]])
def test_columns_are_gathered_by_rank(pool: Pool, sizes: list[int]) -> None:
    blocks = [torch.arange(2 * n, dtype=torch.float64).view(2, -1) + 100 * rank for rank, n in enumerate(sizes)]
    for columns in pool.run(gathered, 2, sizes):
        assert torch.equal(columns, torch.cat(blocks, 1))


def test_one_process_gathers_its_own_columns() -> None:
    assert torch.equal(all_gather_columns(torch.ones(2, 3), torch.device("cpu")), torch.ones(2, 3))
