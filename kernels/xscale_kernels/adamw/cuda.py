"""AdamW in CUDA C++: one launch for all tensors, four elements at a time."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xscale_kernels import cuda_library
from xscale_kernels.tensor_table import TensorTable

if TYPE_CHECKING:
    from xscale_kernels.adamw.hyperparameters import AdamWHyperparameters, Tensors

SOURCE = Path(__file__).with_name("step.cu")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def step_(
    params: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    scale: torch.Tensor | None,
    hyper: AdamWHyperparameters,
) -> None:
    """CUDA implementation of `reference_step_` for float32 moments."""
    device = params[0].device
    library = cuda_library.library(SOURCE, device)
    block = library.adamw_block
    block.restype = ctypes.c_int64
    table = TensorTable.of((params, grads, means, squares), block())
    factor = None if scale is None else scale.to(device, torch.float32)
    addresses = (table.numbers, table.tensor_of, table.first_of)
    numbers = (
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        hyper.weight_decay,
        hyper.correction1,
        hyper.correction2,
    )
    cuda_library.call(
        library.adamw_step,
        device,
        TYPES[params[0].dtype],
        TYPES[grads[0].dtype],
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in addresses),
        ctypes.c_void_p(None if factor is None else factor.data_ptr()),
        ctypes.c_int64(table.tensors),
        ctypes.c_int64(table.blocks),
        *(ctypes.c_float(number) for number in numbers),
    )
