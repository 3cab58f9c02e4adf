"""Addresses and sizes of many tensors on the device, so that one launch processes all of them (multi-tensor apply)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorTable:
    """Table of one launch. It is cached by addresses and sizes, which rarely change from one step to the next."""

    numbers: torch.Tensor
    """int64 on the tensors' device: the addresses role by role, [roles * tensors], then the sizes [tensors]."""
    tensor_of: torch.Tensor
    """[blocks] int64: index of the block's tensor."""
    first_of: torch.Tensor
    """[blocks] int64: offset of the block's first element in its tensor."""
    tensors: int
    blocks: int
    aligned: bool
    """Whether every address is a multiple of 16 bytes, as vectorised loads need."""

    @staticmethod
    def of(roles: Sequence[Sequence[torch.Tensor]], block: int) -> TensorTable:
        """Return the table. roles: sequences of contiguous tensors that match in size; block: elements of a block."""
        sizes = tuple(tensor.numel() for tensor in roles[0])
        addresses = tuple(tensor.data_ptr() for role in roles for tensor in role)
        device = roles[0][0].device
        tensor_of, first_of = _block_map(sizes, block, device)
        # An empty tensor has no address; no block reads it.
        aligned = not any(address % 16 for address in addresses)
        numbers = _numbers(addresses, sizes, device)
        return TensorTable(numbers, tensor_of, first_of, len(sizes), tensor_of.shape[0], aligned)


@functools.lru_cache(maxsize=16)
def _block_map(
    sizes: tuple[int, ...], block: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor and first element of each block: 16 bytes a block, which no step changes."""
    counts = (torch.tensor(sizes, dtype=torch.int64) + block - 1) // block
    tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first_of = (torch.arange(tensor_of.shape[0]) - (counts.cumsum(0) - counts)[tensor_of]) * block
    return tensor_of.to(device), first_of.to(device)


@functools.lru_cache(maxsize=16)
def _numbers(
    addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    return torch.tensor((*addresses, *sizes), dtype=torch.int64).to(device)
