"""MXFP4 (Open Compute Project 2023, Microscaling Formats): four-bit weights in blocks of 32 with a common exponent.

An element (E2M1) has a sign, two bits of exponent and one of mantissa; a block's scale (E8M0) is 2^(byte - 127). A byte
holds two elements, the first in its low four bits. Published gpt-oss checkpoints have the experts in this format.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xscale.core.files.file_safety import decode_json, read_regular

METHOD = "mxfp4"
"""Name of the format under `quantization_config.quant_method` in config.json."""
BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors that hold a weight."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three low bits; the fourth is the sign."""


class TensorFile(Protocol):
    """An open file of named tensors."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


def quantization_method(data: Mapping[str, Any]) -> str | None:
    """Return the name of the format of a config.json's quantised weights; None: they are not."""
    quantization = data.get("quantization_config")
    return None if not quantization else str(dict(quantization).get("quant_method"))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values [..., n * 32] of the bytes [..., n, 16] and of the scales [..., n], both uint8.

    The bytes may also be [..., n * 16].
    """
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    pairs = blocks.reshape(*scales.shape, BLOCK // 2).int()
    elements = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)  # [..., n, 32]
    return torch.ldexp(values[elements], scales.int()[..., None] - 127).flatten(-2)


@dataclass(frozen=True)
class QuantizedFile:
    """The weights of a file in this format, each as gpt-oss has it without: [E, inputs, outputs]."""

    files: Mapping[str, TensorFile]
    """Name of a stored tensor -> its file."""

    def keys(self) -> Iterable[str]:
        names = (name.removesuffix(BLOCKS) for name in self.files if name.endswith(BLOCKS))
        return [name for name in names if name + SCALES in self.files]

    def get_tensor(self, name: str) -> Tensor:
        blocks, scales = (
            self.files[name + ending].get_tensor(name + ending) for ending in (BLOCKS, SCALES)
        )
        # Blocks are along the inputs, the last axis, and outputs are before it.
        return dequantize(blocks, scales).mT


def dequantized(files: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Return name -> file with the two tensors of each weight in this format replaced by the weight."""
    quantized = QuantizedFile(files)
    names = list(quantized.keys())
    stored = {name + ending for name in names for ending in (BLOCKS, SCALES)}
    kept = {name: file for name, file in files.items() if name not in stored}
    return kept | dict.fromkeys(names, quantized)


def loading_options(folder: Path) -> dict[str, Any]:
    """Return the arguments with which transformers loads the model of `folder` with weights that are not quantised."""
    if quantization_method(decode_json(read_regular(folder / "config.json"))) != METHOD:
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}
