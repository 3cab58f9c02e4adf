"""Addresses and sizes of many tensors on the device, so that one launch can work on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Table:
    """Made on the host each time (addresses may change), in one copy: about a microsecond a tensor."""

    numbers: torch.Tensor
    """int64 on the tensors' device: the addresses role by role, [roles * tensors], then the sizes [tensors]."""
    tensor_of: torch.Tensor
    """[blocks] int64: the tensor that a block works on."""
    first_of: torch.Tensor
    """[blocks] int64: its first element there."""
    tensors: int
    blocks: int

    @staticmethod
    def of(roles: Sequence[Sequence[torch.Tensor]], block: int) -> Table:
        """roles: sequences that match tensor by tensor, contiguous and on one device. block: elements of a block."""
        tensors = len(roles[0])
        sizes = torch.tensor([each.numel() for each in roles[0]])
        blocks = (sizes + block - 1) // block
        tensor_of = torch.repeat_interleave(torch.arange(tensors), blocks)
        total = tensor_of.shape[0]
        first_of = (torch.arange(total) - (blocks.cumsum(0) - blocks)[tensor_of]) * block
        addresses = torch.tensor([each.data_ptr() for role in roles for each in role], dtype=torch.int64)
        whole = torch.cat((addresses, sizes, tensor_of, first_of)).to(roles[0][0].device)
        at = addresses.shape[0] + tensors
        return Table(whole[:at], whole[at : at + total], whole[at + total :], tensors, total)
