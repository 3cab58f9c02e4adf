"""squared_norm in CUDA C++: two launches for all tensors, in a fixed order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from xscale_kernels import cuda_library
from xscale_kernels.tensor_table import TensorTable

SOURCE = Path(__file__).with_name("sum.cu")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """CUDA implementation of `reference_squared_norm`."""
    device = tensors[0].device
    library = cuda_library.library(SOURCE, device)
    block = library.squared_norm_block
    block.restype = ctypes.c_int64
    # Strided tensors are copied; their order does not change the sum of squares.
    held = [tensor.detach().contiguous() for tensor in tensors]
    table = TensorTable.of((held,), block())
    room = torch.empty(table.blocks, dtype=torch.float64, device=device)
    out = torch.empty((), dtype=torch.float64, device=device)
    cuda_library.call(
        library.squared_norm_sum,
        device,
        TYPES[tensors[0].dtype],
        *(
            ctypes.c_void_p(tensor.data_ptr())
            for tensor in (table.numbers, table.tensor_of, table.first_of, room, out)
        ),
        ctypes.c_int64(table.tensors),
        ctypes.c_int64(table.blocks),
    )
    return out
