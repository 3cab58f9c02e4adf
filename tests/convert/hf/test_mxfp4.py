"""MXFP4 weights: the values of the format's tables, as transformers reads them, and an import of a gpt-oss in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.convert.hf.models import SECTIONS, checkpoint
from xscale.convert.hf.export_model import export_model
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.mxfp4 import BLOCKS, SCALES, dequantize

# Table 5 of the specification (E2M1): the bits exponent exponent mantissa, bias 1, without infinities.
E2M1 = {0b000: 0.0, 0b001: 0.5, 0b010: 1.0, 0b011: 1.5, 0b100: 2.0, 0b101: 3.0, 0b110: 4.0, 0b111: 6.0}


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    """Random bytes [..., n, 16] and scales [..., n] of weights of about 1/8."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)


def test_values_are_those_of_the_specification() -> None:
    blocks, scales = drawn(2, 3)
    expected = torch.empty(2, 96)
    for row in range(2):
        for block in range(3):
            for at in range(32):
                byte = int(blocks[row, block, at // 2])
                bits = byte >> 4 if at % 2 else byte & 15
                sign = -1 if bits & 8 else 1
                expected[row, 32 * block + at] = sign * E2M1[bits & 7] * 2.0 ** (int(scales[row, block]) - 127)
    assert torch.equal(dequantize(blocks, scales), expected)
    assert torch.equal(dequantize(blocks.flatten(-2), scales), expected)


def test_values_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = drawn(3, 6, 2)
    expected = theirs.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize(blocks, scales).mT, expected)


def quantized(folder: Path) -> dict[str, Tensor]:
    """Put random MXFP4 weights in the place of the experts' products of a gpt-oss folder; returns these by name."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors, weights = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = drawn(experts, outputs, inputs // 32)
        tensors |= {name + BLOCKS: blocks, name + SCALES: scales}
        weights[name] = dequantize(blocks, scales).mT
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return weights


def test_a_quantised_gpt_oss_is_imported(tmp_path: Path) -> None:
    """Its logits are those of the library, which reads the same files."""
    section: dict[str, Any] = json.loads(json.dumps(SECTIONS["gpt_oss"][1]))
    section["stack"]["block"]["ffn"]["expert"]["hidden"] = 64
    path, _ = checkpoint(tmp_path / "run", section)
    assert export_model(path, tmp_path / "out", architecture="gpt_oss", say=lambda _: None) == 0
    weights = quantized(tmp_path / "out")
    imported = import_model(tmp_path / "out")
    assert imported.comparison.within(1e-5), imported.comparison
    assert imported.comparison.largest > 0.1
    fused = weights["model.layers.1.mlp.experts.gate_up_proj"]
    ours = "stack.blocks.1.ffn.part.experts"
    assert torch.equal(imported.weights[f"{ours}.up"], fused[..., 1::2].mT)
    assert torch.equal(imported.weights[f"{ours}.gate"], fused[..., ::2].mT)
    assert torch.equal(imported.weights[f"{ours}.down"], weights["model.layers.1.mlp.experts.down_proj"].mT)
