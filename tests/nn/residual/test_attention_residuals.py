"""Attention residuals against their equations, full ones and in blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xscale.conformance.small_parts import dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.model.decoder import Decoder

WIDTH, LENGTH = 8, 5
MIXER, FFN = {"kind": "attention", "heads": 2}, {"kind": "dense", "hidden": 12}


def built(size: int, depth: int = 3) -> Any:
    residual = {"kind": "attention_residuals", "sublayers": size}
    block = decode(BlockConfig, {"mixer": MIXER, "ffn": FFN, "residual": residual})
    return ready(Stack(StackConfig(depth=depth, block=block), dims(width=WIDTH)))


def mixture(part: Any, values: list[Tensor]) -> Tensor:
    """h = sum_i a_i v_i with a_i = exp(w . RMSNorm(v_i)) / sum_j exp(w . RMSNorm(v_j)), v_i [B, T, D]."""
    kernels = [torch.exp((part.key_norm(value) * part.query).sum(-1, keepdim=True)) for value in values]
    total = sum(kernels)
    return sum((kernel / total) * value for kernel, value in zip(kernels, values, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stack_is_that_of_the_paper(size: int) -> None:
    """A sublayer of block n reads b_0 ... b_{n-1}, and from the second on the sum of the outputs before it in n."""
    stack, about = built(size), tokens(LENGTH)
    x = drawn(2, LENGTH, WIDTH)
    sublayers = [sublayer for block in stack.blocks.values() for sublayer in block.sublayers().values()]
    done, partial = [x], []
    for sublayer in sublayers:
        h = mixture(sublayer.depth_mixture, [*done, *([torch.stack(partial).sum(0)] if partial else [])])
        partial.append(sublayer.part(sublayer.norm(h), about))
        if len(partial) == size:
            done, partial = [*done, torch.stack(partial).sum(0)], []
    values = [*done, *([torch.stack(partial).sum(0)] if partial else [])]
    wanted = stack.norm(mixture(stack.stream.output_mixture, values))
    torch.testing.assert_close(stack(x, about), wanted, rtol=1e-11, atol=1e-11)


def test_shared_sublayers_begin_blocks_alike() -> None:
    residual = {"kind": "attention_residuals", "sublayers": 3}
    stack = {"depth": 2, "share": "all", "block": {"mixer": MIXER, "ffn": FFN, "residual": residual}}
    config = decode(Decoder.Config, {"width": WIDTH, "stack": stack})
    (problem,) = Decoder.check(config, (17, LENGTH), "model")
    assert problem.path == "model.stack.block.residual.sublayers"
    assert problem.advice == "Take 1 or 2, or model.stack.share=none."
